"""Architectures by their building blocks, sizes by name, and the settings that determine the shape of a model.

Other code asks for a property (`gated`, `is_encoder_decoder`), never for a name: a further architecture is then a line
of `ARCHITECTURES`, and a `Family` with the weight rules that export it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BeforeValidator, Field

from zerokara.base.errors import Fault
from zerokara.config.data import SampleLengths, causal, with_spans
from zerokara.config.settings import Auto, Entry, NaturalInt, PositiveFloat, PositiveInt, Settings, as_tuple

Name = Literal[
    "llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "gpt2", "mixtral", "qwen3_moe", "t5", "switch", "t5_moe"
]  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """The properties of one architecture."""

    gated: bool = True  # feed-forward layers: SwiGLU, gated GELU
    activation: Literal["silu", "gelu_tanh"] = "silu"  # `gelu_new` is Hugging Face's name of the second
    has_biases: bool = False  # in linear layers and norms
    has_qkv_biases: bool = False  # in the projections of queries, keys and values alone
    qk_norm: Literal["", "head", "projection"] = ""
    """Norm of queries and of keys: of each head, with one weight vector for all heads, or of all heads together."""
    norms_outputs: bool = False  # of attention and feed-forward layers, instead of their inputs
    positions: Literal["rotary", "learned", "relative"] = "rotary"  # embedding, embedding, attention bias
    unrotated_every: int = 0  # n: every n-th layer has no positions (NoPE); 0: all layers have them
    supports_gqa: bool = True  # several query heads share one key and value head
    is_encoder_decoder: bool = False  # the decoder has cross-attention to an encoder
    moe_every: int = 0
    """Default of moe_layers: n for experts in every n-th layer; 0 if the architecture has none."""
    experts_per_token: int = 0  # default
    no_class: str = ""
    """Reason why no Hugging Face class can hold such a model; empty if one can."""
    tokenizer_class: str = ""
    """Class with which transformers opens every tokenizer of this family, whatever the files say; it cannot read a
    SentencePiece model. Empty where the files decide. Source: transformers 5.23,
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS.
    """

    def rotates(self, layer: int) -> bool:
        """True if the layer, counted from 0, has rotary positions, where the architecture has them."""
        return not self.unrotated_every or (layer + 1) % self.unrotated_every != 0


_T5 = Architecture(activation="gelu_tanh", positions="relative", supports_gqa=False, is_encoder_decoder=True)
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(),
    "mistral": Architecture(),
    "qwen2": Architecture(has_qkv_biases=True, tokenizer_class="Qwen2Tokenizer"),
    "qwen3": Architecture(qk_norm="head"),
    "smollm3": Architecture(unrotated_every=4),
    "olmo2": Architecture(qk_norm="projection", norms_outputs=True),
    "gpt2": Architecture(gated=False, activation="gelu_tanh", has_biases=True, positions="learned", supports_gqa=False),
    "mixtral": Architecture(moe_every=1, experts_per_token=2),
    "qwen3_moe": Architecture(qk_norm="head", moe_every=1, experts_per_token=2),
    "t5": _T5,
    "switch": replace(_T5, gated=False, moe_every=2, experts_per_token=1),
    "t5_moe": replace(
        _T5,
        moe_every=4,
        experts_per_token=2,
        no_class="SwitchTransformersForConditionalGeneration, the nearest, routes a token to one expert, is not gated, "
        "and has experts in layers 1, 1 + n, 1 + 2n, … only",
    ),
}

HEAD_DIM = 64
SizeName = Literal["1M", "3M", "5M", "10M", "20M", "30M", "60M", "125M", "350M", "760M", "1.3B", "2.7B", "6.7B", "13B"]


class ModelSize(NamedTuple):
    """The shape that goes by a name."""

    num_layers: int
    hidden_size: int
    num_attn_heads: int


SIZES: dict[SizeName, ModelSize] = {
    "1M": ModelSize(4, 128, 2),
    "3M": ModelSize(5, 192, 3),
    "5M": ModelSize(4, 256, 4),
    "10M": ModelSize(6, 320, 5),
    "20M": ModelSize(7, 448, 7),
    "30M": ModelSize(8, 512, 8),
    "60M": ModelSize(10, 640, 10),
    "125M": ModelSize(12, 768, 12),
    "350M": ModelSize(24, 1024, 16),
    "760M": ModelSize(24, 1536, 16),
    "1.3B": ModelSize(24, 2048, 16),
    "2.7B": ModelSize(32, 2560, 32),
    "6.7B": ModelSize(32, 4096, 32),
    "13B": ModelSize(40, 5120, 40),
}
"""Shapes in ascending order; an encoder-decoder has half of the layers in the encoder, half in the decoder.

The name is the approximate number of parameters of a decoder, with a vocabulary that fits its size (4,000 pieces at 1M
and 3M, 8,000 at 5M to 30M, 16,000 at 60M, 32,000 from 125M on). From 125M on the shapes are those of GPT-3 (Brown et
al., 2020, table 2.1). Below, as there, the hidden size is about 64 per layer and per head; between half and twice that
proportion the loss hardly changes (Kaplan et al., 2020, figure 5).
"""

_Value = TypeVar("_Value")


def _or(value: _Value | Auto, otherwise: _Value) -> _Value:
    return otherwise if value == "auto" else value


class RopeScaling(Entry):
    """Scaling of the rotary frequencies by transformers' names; a key not given is None."""

    rope_type: Literal["linear", "yarn", "llama3"]
    factor: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    original_max_position_embeddings: PositiveInt | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    attention_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat | None = None
    beta_slow: PositiveFloat | None = None


_WIDTHS = ("hidden_size", "num_attn_heads", "head_dim", "model_size")  # each may follow from the others
_OF_EXPERTS = ("num_experts", "experts_per_token", "moe_ffn_hidden_size", "moe_layers")
_SCALING_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": ((), ()),
    "yarn": (("original_max_position_embeddings",), ("attention_factor", "beta_fast", "beta_slow")),
    "llama3": (("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
}
"""Keys that a type of `RopeScaling` needs beside its factor, and those that it can have."""


class ModelSettings(Settings):
    """The model."""

    architecture: Name = "llama"
    """Model family. Decoders: `llama` (RMSNorm, SwiGLU, rotary positions, grouped-query attention), `mistral` (the same
    under another name), `qwen2` (with biases of queries, keys and values), `qwen3` (with QK-norm, more stable at high
    learning rates), `smollm3` (without positions in every fourth layer), `olmo2` (norms after attention and
    feed-forward layers, QK-norm over all heads), `gpt2` (LayerNorm, GELU, learned positions). Encoder-decoder:
    `t5` (version 1.1, trained by span corruption; RMSNorm, gated GELU, relative position bias). Mixtures of experts:
    `mixtral` (llama, experts in all layers), `qwen3_moe` (qwen3, experts in any layers), `switch` (t5 with plain GELU,
    one expert per token), `t5_moe` (t5, experts in any layers; no Hugging Face class can hold it)."""
    model_size: SizeName | Literal[""] = ""
    """Size by name, about the number of parameters: 1M, 3M, 5M, 10M, 20M, 30M, 60M, 125M, 350M, 760M, 1.3B, 2.7B, 6.7B
    or 13B. It sets num_layers, hidden_size and num_attn_heads where these are `auto`; a number that you set takes
    precedence."""
    num_layers: PositiveInt | Auto = 6
    """Transformer layers; for t5 the number in the encoder, and also in the decoder. `auto` follows model_size."""
    hidden_size: PositiveInt | Auto = 256
    """Hidden size (width), a multiple of num_attn_heads unless head_dim is given. `auto` follows model_size."""
    num_attn_heads: PositiveInt | Auto = 4
    """Attention heads; `auto` follows model_size, or is one for each 64 of a hidden_size that is a number."""
    num_kv_heads: PositiveInt | Auto = "auto"
    """Key and value heads for grouped-query attention (GQA; not gpt2, not t5); `auto` is num_attn_heads: no GQA."""
    head_dim: PositiveInt | Auto = "auto"
    """Size of an attention head; `auto` is hidden_size / num_attn_heads."""
    ffn_hidden_size: PositiveInt | Auto = "auto"
    """Inner size of feed-forward layers; `auto` is 8/3 of hidden_size, rounded up to 64s (gpt2, switch: 4 times)."""
    seq_len: PositiveInt = 256
    """Tokens in a training sequence. This is also the model's context length, unless the model of init_from has a
    longer one, which is kept. For t5 it is the length of the encoder input, which is made from more text (by default,
    512 from 568 tokens)."""
    tie_word_embeddings: bool | Auto = "auto"
    """Share one matrix between the input embedding and the output projection: fewer parameters, good for small models.
    `auto` is true, for t5 false as in version 1.1."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary position embedding (not gpt2, not t5); larger for long sequences."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies, for a longer seq_len (docs/training.md); null for none. For example
    {rope_type: yarn, factor: 4, original_max_position_embeddings: 2048}. The type linear needs only a factor; llama3
    needs low_freq_factor and high_freq_factor as well (Llama 3.1: 1 and 4)."""
    relative_attention_num_buckets: Annotated[PositiveInt, Field(ge=4, multiple_of=4)] = 32
    """t5: buckets of the relative position bias, each with a learned bias per head; a multiple of 4."""
    relative_attention_max_distance: PositiveInt = 128
    """t5: distance in tokens beyond which all positions share one bucket."""
    noise_density: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """t5: fraction of the tokens that are masked, and predicted by the decoder."""
    mean_span_length: Annotated[float, Field(ge=1)] = 3.0
    """t5: average length of a masked span, in tokens. Each span of a sample needs a sentinel (extra_ids of step 1)."""
    num_experts: Annotated[PositiveInt, Field(ge=2)] = 8
    """mixtral, qwen3_moe, switch, t5_moe: experts (feed-forward networks) in each MoE layer."""
    experts_per_token: PositiveInt | Auto = "auto"
    """Experts that each token is routed to (top-k); `auto` is 2, for switch 1."""
    moe_ffn_hidden_size: PositiveInt | Auto = "auto"
    """Inner size of an expert; `auto` is ffn_hidden_size."""
    moe_layers: Annotated[tuple[NaturalInt, ...], BeforeValidator(as_tuple)] | Auto = "auto"
    """Layers with experts, counted from 0, e.g. [3, 7, 11]; the others are dense. `auto` is every layer, for switch
    every second, for t5_moe every fourth. The same in encoder and decoder."""
    norm_epsilon: PositiveFloat | Auto = "auto"
    """Epsilon of the normalization layers; `auto` is 1e-5, for t5 1e-6, which other programs that run T5 assume."""
    init_std: PositiveFloat | Auto = "auto"
    """Standard deviation of the initial weights; `auto` is 0.02, but for t5 with adafactor T5's own rule: 1 for the
    embeddings, and for each matrix a value that depends on its input size."""

    @property
    def traits(self) -> Architecture:
        """The building blocks of the architecture."""
        return ARCHITECTURES[self.architecture]

    @property
    def without_effect(self) -> list[str]:
        """Settings that somebody has changed, and that the architecture does not read."""
        unread = {"noise_density", "mean_span_length"} if not self.traits.is_encoder_decoder else set()
        unread |= set() if self.traits.moe_every else set(_OF_EXPERTS)
        fields = type(self).model_fields
        return [f"{key}: {getattr(self, key)}" for key in sorted(unread) if getattr(self, key) != fields[key].default]

    @property
    def lengths(self) -> SampleLengths:
        return self.text_lengths

    @property
    def text_lengths(self) -> SampleLengths:
        """Lengths of a sample of running text, for pretraining and the proof of an export."""
        if self.traits.is_encoder_decoder:
            return with_spans(self.seq_len, self.noise_density, self.mean_span_length)
        return causal(self.seq_len)

    def resolved_sizes(self) -> dict[str, Any]:
        """Return the settings of the model's shape, each `auto` resolved; without experts theirs are 0."""
        traits = self.traits
        # Without a name there is a fault (the first rule); the other rules go on with some size.
        named = SIZES[self.model_size or "5M"]
        layers = _or(self.num_layers, named.num_layers // 2 if traits.is_encoder_decoder else named.num_layers)
        width = _or(self.hidden_size, named.hidden_size)
        heads = _or(self.num_attn_heads, named.num_attn_heads)
        if self.num_attn_heads == "auto" and self.hidden_size != "auto":
            heads = max(1, width // HEAD_DIM)
        ffn_size = _or(self.ffn_hidden_size, -(-8 * width // (3 * 64)) * 64 if traits.gated else 4 * width)
        # A model with fewer layers has experts in its last.
        every = traits.moe_every
        of_family = tuple(range(min(every, layers) - 1, layers, every)) if every else ()
        moe_layers: tuple[int, ...] = _or(self.moe_layers, of_family)
        experts = {
            "num_experts": self.num_experts,
            "experts_per_token": _or(self.experts_per_token, traits.experts_per_token),
            "moe_ffn_hidden_size": _or(self.moe_ffn_hidden_size, ffn_size),
            "moe_layers": tuple(sorted(set(moe_layers))),
        }
        return {
            "num_layers": layers,
            "hidden_size": width,
            "num_attn_heads": heads,
            "num_kv_heads": _or(self.num_kv_heads, heads),
            "head_dim": _or(self.head_dim, width // heads),
            "ffn_hidden_size": ffn_size,
            "tie_word_embeddings": _or(self.tie_word_embeddings, not traits.is_encoder_decoder),
            "norm_epsilon": _or(self.norm_epsilon, 1e-6 if traits.is_encoder_decoder else 1e-5),
            "init_std": _or(self.init_std, 0.02),
            **(experts if every else dict.fromkeys(experts, 0) | {"moe_layers": ()}),
        }

    def rules(self) -> Iterator[Fault]:
        architecture = f"architecture {self.architecture}"
        made = self.resolved_sizes()
        sizes = {key: getattr(self, key) for key in ("num_layers", "hidden_size", "num_attn_heads")}
        missing = [key for key, value in sizes.items() if value == "auto"]
        if self.model_size and not missing and self.typed("model_size") and not all(map(self.typed, sizes)):
            numbers = ", ".join(f"{key}: {value}" for key, value in sizes.items())
            yield self.fault("model_size", f"has no effect: {numbers} are given", "set one of these to auto", [*sizes])
        elif missing and not self.model_size:
            rule = "takes its value from model_size, which is empty"
            yield self.fault(missing[0], rule, "give a number, or model_size: 125M", ["model_size"])

        width, heads, head_dim = made["hidden_size"], made["num_attn_heads"], made["head_dim"]
        if self.head_dim == "auto" and width % heads:
            lower = width // heads * heads
            remedy = f"try {lower or heads} or {lower + heads}, or give head_dim"
            yield self.fault("hidden_size", f"must be a multiple of num_attn_heads = {heads}", remedy, _WIDTHS)
        elif self.traits.positions == "rotary" and head_dim % 2:
            key = "hidden_size" if self.head_dim == "auto" else "head_dim"
            rule = f"must give an even head_dim for {architecture}, with num_attn_heads = {heads}: it is {head_dim}"
            yield self.fault(key, rule, reads=["architecture", *_WIDTHS])
        elif self.architecture == "gpt2" and heads * head_dim != width:
            rule = f"must be hidden_size / num_attn_heads = {width / heads:g} for {architecture}"
            yield self.fault("head_dim", rule, "auto", ["architecture", *_WIDTHS])
        if heads % made["num_kv_heads"]:
            divisors = [n for n in range(1, heads + 1) if heads % n == 0]
            yield self.fault("num_kv_heads", f"must divide num_attn_heads = {heads}", f"one of {divisors}", _WIDTHS)
        elif not self.traits.supports_gqa and made["num_kv_heads"] != heads:
            rule = f"must be auto for {architecture}, which has no grouped-query attention"
            yield self.fault("num_kv_heads", rule, reads=["architecture", *_WIDTHS])

        if self.rope_scaling:
            scaling, kind = self.rope_scaling, self.rope_scaling.rope_type
            given, (needed, optional) = scaling.model_dump(exclude_none=True).keys(), _SCALING_KEYS[kind]
            low = scaling.low_freq_factor or scaling.beta_slow or 1.0
            high = scaling.high_freq_factor or scaling.beta_fast or 32.0
            if self.traits.positions != "rotary":
                rule = f"must be null for {architecture}, which has no rotary positions"
                yield self.fault("rope_scaling", rule, reads=["architecture"])
            elif missing := [key for key in needed if key not in given]:
                yield self.fault("rope_scaling", f"of type {kind} needs {', '.join(missing)} too")
            elif unread := given - {"rope_type", "factor", *needed, *optional}:
                yield self.fault(f"rope_scaling.{min(unread)}", f"has no effect in rope_type: {kind}", "remove it")
            elif low >= high:
                yield self.fault("rope_scaling", f"must scale fewer turns than it keeps: {low:g} is not below {high:g}")
        yield from self._expert_rules(made)
        exact = self.relative_attention_num_buckets // 2
        if self.traits.positions == "relative" and self.relative_attention_max_distance <= exact:
            rule = f"must be more than half of relative_attention_num_buckets ({exact} exact distances)"
            reads = ["architecture", "relative_attention_num_buckets"]
            yield self.fault("relative_attention_max_distance", rule, f"try {8 * exact}", reads)
        if self.traits.is_encoder_decoder and self.seq_len < 3:
            rule = f"must be at least 3 for {architecture}: a token, a sentinel and an end token"
            yield self.fault("seq_len", rule, "try 128", ["architecture"])

    def _expert_rules(self, made: Mapping[str, Any]) -> Iterator[Fault]:
        architecture = f"architecture {self.architecture}"
        if self.traits.moe_every:
            layers, moe_layers = made["num_layers"], made["moe_layers"]
            reads = ["architecture", "num_layers", "model_size"]
            step = layers // max(1, len(moe_layers))
            if not moe_layers or moe_layers[-1] >= layers:
                rule = f"must name some of the num_layers = {layers} layers, counted from 0"
                yield self.fault("moe_layers", rule, f"e.g. [{layers - 1}]", reads)
            elif self.architecture == "mixtral" and len(moe_layers) < layers:
                rule = f"must be auto for {architecture}, which has experts in all num_layers"
                yield self.fault("moe_layers", rule, "take architecture: qwen3_moe", reads)
            elif self.architecture == "switch" and moe_layers != tuple(range(min(1, step - 1), layers, step)):
                rule = f"must be 1, 1 + n, 1 + 2n, … for {architecture} (transformers' class): num_layers // n layers"
                yield self.fault("moe_layers", rule, "auto, or take architecture: t5_moe", reads)
            elif self.architecture == "mixtral" and made["experts_per_token"] < 2:
                rule = f"must be at least 2 for {architecture}, whose class gives a single expert the weight 1"
                yield self.fault("experts_per_token", rule, "take architecture: qwen3_moe", ["architecture"])
            if made["experts_per_token"] > self.num_experts:
                rule = f"must be at most num_experts = {self.num_experts}"
                yield self.fault("experts_per_token", rule, reads=["num_experts"])
        if self.architecture == "switch":
            if made["experts_per_token"] != 1:
                remedy = "auto, or take architecture: t5_moe"
                yield self.fault("experts_per_token", f"must be 1 for {architecture}", remedy, ["architecture"])
            if made["moe_ffn_hidden_size"] != made["ffn_hidden_size"]:
                rule = f"must be ffn_hidden_size = {made['ffn_hidden_size']} for {architecture}"
                yield self.fault("moe_ffn_hidden_size", rule, "auto", ["architecture", "ffn_hidden_size", *_WIDTHS])
