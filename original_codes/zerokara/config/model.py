"""The settings of `config.yaml` that determine the shape of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from zerokara.config.architectures import ARCHITECTURES, HEAD_DIM, Architecture, ModelSize, Name, SizeName, size_named
from zerokara.config.data import SampleLengths, causal, with_spans
from zerokara.config.settings import Auto, NaturalWhole, PositiveNumber, PositiveWhole, Settings, as_tuple
from zerokara.errors import Fault

Layers = Annotated[tuple[NaturalWhole, ...], BeforeValidator(as_tuple)]


def switch_step(num_layers: int, expert_layers: tuple[int, ...]) -> int:
    """The n for which transformers' Switch has experts in layers 1, 1 + n, … (n = 1: in all); 0 if none fits."""
    for step in range(1, num_layers + 1):
        layers = tuple(layer for layer in range(num_layers) if step == 1 or layer % step == 1)
        if layers == expert_layers and num_layers // len(expert_layers) == step:
            return step
    return 0


class ModelSettings(Settings):
    """The model."""

    architecture: Name = "llama"
    """Model family. Decoders: `llama` (RMSNorm, SwiGLU, rotary positions, grouped-query attention), `qwen3` (the same
    with QK-norm, more stable at high learning rates), `gpt2` (LayerNorm, GELU, learned positions). Encoder-decoder:
    `t5` (version 1.1, trained by span corruption; RMSNorm, gated GELU, relative position bias). Mixtures of experts:
    `mixtral` (llama, experts in all layers), `qwen3_moe` (qwen3, experts in any layers), `switch` (t5 with plain GELU,
    one expert per token), `t5_moe` (t5, experts in any layers; no Hugging Face class can hold it)."""
    model_size: SizeName | Literal[""] = ""
    """Size by name, about the number of parameters: 1M, 3M, 5M, 10M, 20M, 30M, 60M, 125M, 350M, 760M, 1.3B, 2.7B, 6.7B
    or 13B. It gives num_layers, hidden_size and num_attn_heads where these are `auto`."""
    num_layers: PositiveWhole | Auto = 6
    """Transformer layers; for t5 in the encoder and in the decoder each. `auto` is that of model_size."""
    hidden_size: PositiveWhole | Auto = 256
    """Hidden size (model width); a multiple of num_attn_heads, unless head_dim is given. `auto` is that of
    model_size."""
    num_attn_heads: PositiveWhole | Auto = 4
    """Attention heads; `auto` is as many as model_size has, or with another hidden_size one for each 64 of it."""
    num_kv_heads: PositiveWhole | Auto = "auto"
    """Key and value heads for grouped-query attention (GQA; not gpt2, not t5); `auto` is num_attn_heads: no GQA."""
    head_dim: PositiveWhole | Auto = "auto"
    """Size of an attention head; `auto` is hidden_size / num_attn_heads."""
    ffn_hidden_size: PositiveWhole | Auto = "auto"
    """Inner size of the feed-forward layers; `auto` is 8/3 of hidden_size rounded up to a multiple of 64, or 4 times
    hidden_size for gpt2 and switch."""
    seq_len: PositiveWhole = 256
    """Tokens in a training sequence, and the model's context length. For t5 the length of the encoder input, which is
    made from a somewhat longer text (512 from 568 tokens, by default)."""
    tie_word_embeddings: bool | Auto = "auto"
    """Share one matrix between the input embedding and the output projection: fewer parameters, good for small models.
    `auto` is true, for t5 false as in version 1.1."""
    rope_theta: PositiveNumber = 10000.0
    """Base of the rotary position embedding (not gpt2, not t5); larger for long sequences."""
    relative_attention_num_buckets: Annotated[PositiveWhole, Field(ge=4, multiple_of=4)] = 32
    """t5: buckets of the relative position bias, each with a learned bias per head; a multiple of 4."""
    relative_attention_max_distance: PositiveWhole = 128
    """t5: distance in tokens beyond which all positions share one bucket."""
    noise_density: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """t5: fraction of the tokens that are masked, and predicted by the decoder."""
    mean_span_length: Annotated[float, Field(ge=1)] = 3.0
    """t5: average length of a masked span, in tokens. Each span of a sample needs a sentinel token of its own
    (extra_ids of the tokenizer)."""
    num_experts: Annotated[PositiveWhole, Field(ge=2)] = 8
    """mixtral, qwen3_moe, switch, t5_moe: experts (feed-forward networks) in each MoE layer."""
    experts_per_token: PositiveWhole | Auto = "auto"
    """Experts that each token is routed to (top-k); `auto` is 2, for switch 1."""
    moe_ffn_hidden_size: PositiveWhole | Auto = "auto"
    """Inner size of an expert; `auto` is ffn_hidden_size."""
    moe_layers: Layers | Auto = "auto"
    """Layers with experts, counted from 0, e.g. [3, 7, 11]; the others are dense. `auto` is every layer, for switch
    every second, for t5_moe every fourth. The same in encoder and decoder."""
    norm_epsilon: PositiveNumber | Auto = "auto"
    """Epsilon of the normalization layers; `auto` is 1e-5, for t5 1e-6, which other programs that run T5 assume."""
    init_std: PositiveNumber | Auto = "auto"
    """Standard deviation of the initial weights; `auto` is 0.02, but for t5 with adafactor T5's own rule: 1 for the
    embeddings, and for each matrix a value that depends on its input size."""

    @property
    def traits(self) -> Architecture:
        """The building blocks of the architecture."""
        return ARCHITECTURES[self.architecture]

    # The settings above with `auto` resolved.

    @property
    def layers(self) -> int:
        return self._named_size.num_layers if self.num_layers == "auto" else self.num_layers

    @property
    def width(self) -> int:
        return self._named_size.hidden_size if self.hidden_size == "auto" else self.hidden_size

    @property
    def heads(self) -> int:
        if self.num_attn_heads != "auto":
            return self.num_attn_heads
        return self._named_size.num_attn_heads if self.hidden_size == "auto" else max(1, self.width // HEAD_DIM)

    @property
    def _named_size(self) -> ModelSize:
        # Without a name there is a fault (the first rule); the other rules go on with some size.
        return size_named(self.model_size or "5M", self.traits.is_encoder_decoder)

    @property
    def kv_heads(self) -> int:
        return self.heads if self.num_kv_heads == "auto" else self.num_kv_heads

    @property
    def head_dimension(self) -> int:
        return self.width // self.heads if self.head_dim == "auto" else self.head_dim

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size != "auto":
            return self.ffn_hidden_size
        if not self.traits.gated:
            return 4 * self.width
        return -(-8 * self.width // (3 * 64)) * 64

    @property
    def epsilon(self) -> float:
        if self.norm_epsilon != "auto":
            return self.norm_epsilon
        return 1e-6 if self.traits.is_encoder_decoder else 1e-5

    @property
    def initial_std(self) -> float:
        """Not where T5's own rule applies."""
        return 0.02 if self.init_std == "auto" else self.init_std

    @property
    def expert_ffn_size(self) -> int:
        return self.ffn_size if self.moe_ffn_hidden_size == "auto" else self.moe_ffn_hidden_size

    @property
    def top_k(self) -> int:
        """0 without experts."""
        if not self.traits.moe_every:
            return 0
        return self.traits.experts_per_token if self.experts_per_token == "auto" else self.experts_per_token

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """In ascending order; empty without experts."""
        every = self.traits.moe_every
        if not every:
            return ()
        if self.moe_layers == "auto":
            return tuple(range(every - 1, self.layers, every))
        return tuple(sorted(set(self.moe_layers)))

    @property
    def ties_embeddings(self) -> bool:
        return not self.traits.is_encoder_decoder if self.tie_word_embeddings == "auto" else self.tie_word_embeddings

    @property
    def lengths(self) -> SampleLengths:
        """Lengths of a training sample: raw tokens, inputs and targets."""
        if self.traits.objective == "causal":
            return causal(self.seq_len)
        return with_spans(self.seq_len, self.noise_density, self.mean_span_length)

    def rules(self) -> Iterator[Fault]:
        architecture = f"architecture {self.architecture}"
        sizes = {key: getattr(self, key) for key in ("num_layers", "hidden_size", "num_attn_heads")}
        missing = [key for key, value in sizes.items() if value == "auto"]
        if self.model_size and not missing:
            given = ", ".join(f"{key}: {value}" for key, value in sizes.items())
            yield self.fault("model_size", f"has no effect: {given} stand beside it", "set these to auto, or it to ''")
        elif missing and not self.model_size:
            rule = "takes its value from model_size, which is empty"
            yield self.fault(missing[0], rule, "give a number, or model_size: 125M")

        heads = f"num_attn_heads = {self.heads}"
        if self.head_dim == "auto" and self.width % self.heads:
            lower = self.width // self.heads * self.heads
            remedy = f"try {lower or self.heads} or {lower + self.heads}, or give head_dim"
            yield self.fault("hidden_size", f"must be a multiple of {heads}", remedy)
        elif self.traits.positions == "rotary" and self.head_dimension % 2:
            key = "hidden_size" if self.head_dim == "auto" else "head_dim"
            rule = f"must give an even head_dim for {architecture} (rotary positions), with {heads}: it is"
            yield self.fault(key, f"{rule} {self.head_dimension}")
        if self.heads % self.kv_heads:
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            yield self.fault("num_kv_heads", f"must divide {heads}", f"one of {divisors}")
        elif not self.traits.supports_gqa and self.kv_heads != self.heads:
            yield self.fault("num_kv_heads", f"must be auto for {architecture}, which has no grouped-query attention")

        if self.traits.moe_every:
            if not self.expert_layers or self.expert_layers[-1] >= self.layers:
                rule = f"must name some of the num_layers = {self.layers} layers, counted from 0"
                yield self.fault("moe_layers", rule, f"e.g. [{self.layers - 1}]")
            elif self.architecture == "mixtral" and len(self.expert_layers) < self.layers:
                rule = f"must be auto for {architecture}, which has experts in all num_layers"
                yield self.fault("moe_layers", rule, "take architecture: qwen3_moe")
            elif self.architecture == "switch" and not switch_step(self.layers, self.expert_layers):
                rule = f"must be 1, 1 + n, 1 + 2n, … for {architecture} (transformers' class): num_layers // n layers"
                yield self.fault("moe_layers", rule, "auto, or take architecture: t5_moe")
        if self.top_k > self.num_experts:
            yield self.fault("experts_per_token", f"must be at most num_experts = {self.num_experts}")
        elif self.architecture == "switch" and self.top_k != 1:
            yield self.fault("experts_per_token", f"must be 1 for {architecture}", "auto, or take architecture: t5_moe")
        if self.architecture == "switch" and self.expert_ffn_size != self.ffn_size:
            rule = f"must be ffn_hidden_size = {self.ffn_size} for {architecture}"
            yield self.fault("moe_ffn_hidden_size", rule, "auto")

        exact = self.relative_attention_num_buckets // 2
        if self.traits.positions == "relative" and self.relative_attention_max_distance <= exact:
            rule = f"must be more than half of relative_attention_num_buckets ({exact} exact distances)"
            yield self.fault("relative_attention_max_distance", rule, f"try {8 * exact}")
        if self.traits.objective != "causal" and self.seq_len < 3:
            rule = f"must be at least 3 for {architecture}: a token, a sentinel and an end token"
            yield self.fault("seq_len", rule, "try 128")
