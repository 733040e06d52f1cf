"""What fixes the shape of a model, in `config.yaml`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from zerokara.config import sample_lengths
from zerokara.config.architectures import ARCHITECTURES, Architecture, Name
from zerokara.config.sample_lengths import SampleLengths
from zerokara.config.settings import Auto, NaturalWhole, PositiveNumber, PositiveWhole, Settings, as_tuple, rule
from zerokara.errors import Fault

Layers = Annotated[tuple[NaturalWhole, ...], BeforeValidator(as_tuple)]


def switch_step(num_layers: int, sparse: tuple[int, ...]) -> int:
    """The n by which transformers' Switch says that the layers 1, 1 + n, … are sparse (of n = 1 all); 0: it cannot."""
    for step in range(1, num_layers + 1):
        there = tuple(layer for layer in range(num_layers) if step == 1 or layer % step == 1)
        if there == sparse and num_layers // len(sparse) == step:
            return step
    return 0


class ModelSettings(Settings):
    """The model."""

    title: ClassVar[str] = "The model"

    architecture: Name = "llama"
    """`llama` (RMSNorm, SwiGLU, rotary positions, grouped queries), `qwen3` (the same, and each head's queries and keys
    are normed: steadier at high learning rates), `gpt2` (LayerNorm, GELU, learned positions) or `t5` (version 1.1: an
    encoder reads text with gaps, a decoder writes what is missing; RMSNorm, gated GELU, relative positions). With
    experts, of which each token takes some: `mixtral` (llama, all layers sparse), `qwen3_moe` (qwen3, any layers),
    `switch` (t5 with plain GELU, one expert a token), `t5_moe` (t5, any layers; no Hugging Face class holds it)."""
    num_layers: PositiveWhole = 6
    """Transformer layers; of t5 so many in the encoder and as many in the decoder."""
    hidden_size: PositiveWhole = 256
    """Width of the model; a multiple of num_attn_heads, unless head_dim is given."""
    num_attn_heads: PositiveWhole = 4
    """Attention heads."""
    num_kv_heads: PositiveWhole | Auto = "auto"
    """Key and value heads shared among the attention heads (not gpt2, not t5); `auto` is one for each."""
    head_dim: PositiveWhole | Auto = "auto"
    """Width of an attention head; `auto` is hidden_size / num_attn_heads."""
    ffn_hidden_size: PositiveWhole | Auto = "auto"
    """Inner width of the feed-forward layers; `auto` is 8/3 of hidden_size rounded up to 64, for gpt2 4 times."""
    seq_len: PositiveWhole = 256
    """Tokens in a training sequence, and the longest text the model can read. Of t5 what the encoder reads: it takes
    somewhat more text, whose gaps the decoder writes."""
    tie_word_embeddings: bool | Auto = "auto"
    """Use one matrix for reading and for predicting tokens: fewer parameters, good for small models. `auto` is true, of
    t5 false, as in its version 1.1."""
    rope_theta: PositiveNumber = 10000.0
    """Base of the rotary positions (not gpt2, not t5); larger for long sequences."""
    relative_attention_num_buckets: Annotated[PositiveWhole, Field(ge=4, multiple_of=4)] = 32
    """t5: kinds of distance that have a bias of their own in each head; a multiple of 4."""
    relative_attention_max_distance: PositiveWhole = 128
    """t5: distance in tokens from which on all are of one kind."""
    noise_density: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """t5: share of the tokens that the encoder does not see and the decoder writes."""
    mean_span_length: Annotated[float, Field(ge=1)] = 3.0
    """t5: how many of them lie together, on average. Each such gap needs a sentinel of the tokenizer (extra_ids)."""
    num_experts: Annotated[PositiveWhole, Field(ge=2)] = 8
    """mixtral, qwen3_moe, switch, t5_moe: feed-forward networks in each sparse layer."""
    experts_per_token: PositiveWhole | Auto = "auto"
    """How many of them each token takes; `auto` is 2, of switch 1."""
    moe_ffn_hidden_size: PositiveWhole | Auto = "auto"
    """Inner width of each; `auto` is ffn_hidden_size."""
    moe_layers: Layers | Auto = "auto"
    """Which layers hold experts, counted from 0, e.g. [3, 7, 11]; `auto` is every one, of switch every second, of
    t5_moe every fourth. The others are dense. Encoder and decoder are alike."""
    norm_epsilon: PositiveNumber | Auto = "auto"
    """Added to the variance in normalisations; `auto` is 1e-5, of t5 1e-6, which other programs that
    run a T5 have built in."""
    init_std: PositiveNumber | Auto = "auto"
    """Standard deviation of the initial weights; `auto` is 0.02. With adafactor that of t5 is as T5 has it: embeddings
    1, each matrix by the width that it multiplies."""

    @property
    def traits(self) -> Architecture:
        """What the architecture is made of."""
        return ARCHITECTURES[self.architecture]

    @property
    def kv_heads(self) -> int:
        """Key and value heads with `auto` resolved."""
        return self.num_attn_heads if self.num_kv_heads == "auto" else self.num_kv_heads

    @property
    def ffn_size(self) -> int:
        """Inner feed-forward width with `auto` resolved."""
        if self.ffn_hidden_size != "auto":
            return self.ffn_hidden_size
        if not self.traits.gated:
            return 4 * self.hidden_size
        return -(-8 * self.hidden_size // (3 * 64)) * 64

    @property
    def epsilon(self) -> float:
        """What normalisations add to the variance, with `auto` resolved."""
        if self.norm_epsilon != "auto":
            return self.norm_epsilon
        return 1e-6 if self.traits.is_encoder_decoder else 1e-5

    @property
    def expert_ffn_size(self) -> int:
        """Inner width of an expert with `auto` resolved."""
        return self.ffn_size if self.moe_ffn_hidden_size == "auto" else self.moe_ffn_hidden_size

    @property
    def top_k(self) -> int:
        """Experts that a token takes with `auto` resolved; 0 where there are none."""
        if not self.traits.moe_every:
            return 0
        return self.traits.experts_per_token if self.experts_per_token == "auto" else self.experts_per_token

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers with experts, `auto` resolved."""
        every = self.traits.moe_every
        if not every:
            return ()
        if self.moe_layers == "auto":
            return tuple(range(every - 1, self.num_layers, every))
        return tuple(sorted(set(self.moe_layers)))

    @property
    def head_dimension(self) -> int:
        """Width of an attention head with `auto` resolved."""
        return self.hidden_size // self.num_attn_heads if self.head_dim == "auto" else self.head_dim

    @property
    def ties_embeddings(self) -> bool:
        """Whether one matrix reads and predicts, with `auto` resolved."""
        return not self.traits.is_encoder_decoder if self.tie_word_embeddings == "auto" else self.tie_word_embeddings

    @property
    def lengths(self) -> SampleLengths:
        """How many tokens a training sample takes, and how many of it are read and written."""
        if self.traits.objective == "causal":
            return sample_lengths.causal(self.seq_len)
        return sample_lengths.with_spans(self.seq_len, self.noise_density, self.mean_span_length)

    @rule("hidden_size", "num_attn_heads", "head_dim")
    def _heads_divide_width(self) -> Iterator[Fault]:
        if self.head_dim == "auto" and self.hidden_size % self.num_attn_heads:
            lower = self.hidden_size // self.num_attn_heads * self.num_attn_heads
            remedy = f"try {lower or self.num_attn_heads} or {lower + self.num_attn_heads}, or give head_dim"
            yield self.fault("hidden_size", f"must be a multiple of num_attn_heads = {self.num_attn_heads}", remedy)

    @rule("architecture", "hidden_size", "num_attn_heads", "head_dim")
    def _rotary_needs_even_heads(self) -> Iterator[Fault]:
        divides = self.head_dim != "auto" or self.hidden_size % self.num_attn_heads == 0
        if self.traits.positions == "rotary" and divides and self.head_dimension % 2:
            key = "hidden_size" if self.head_dim == "auto" else "head_dim"
            yield self.fault(
                key, f"must give heads of even width for rotary positions; they have {self.head_dimension}"
            )

    @rule("num_attn_heads", "num_kv_heads", "architecture")
    def _kv_heads_divide_heads(self) -> Iterator[Fault]:
        if self.num_attn_heads % self.kv_heads:
            divisors = [n for n in range(1, self.num_attn_heads + 1) if self.num_attn_heads % n == 0]
            rule_text = f"must divide num_attn_heads = {self.num_attn_heads}"
            yield self.fault("num_kv_heads", rule_text, f"one of {divisors}")
        elif not self.traits.supports_gqa and self.kv_heads != self.num_attn_heads:
            rule_text = f"must be auto for architecture {self.architecture}, which does not share heads"
            yield self.fault("num_kv_heads", rule_text)

    @rule("architecture", "num_layers", "moe_layers")
    def _sparse_layers_are_there(self) -> Iterator[Fault]:
        if not self.traits.moe_every:
            return
        if not self.expert_layers or self.expert_layers[-1] >= self.num_layers:
            rule_text = f"must name some of the {self.num_layers} layers, counted from 0"
            yield self.fault("moe_layers", rule_text, f"e.g. [{self.num_layers - 1}]")
        elif self.architecture == "mixtral" and len(self.expert_layers) < self.num_layers:
            rule_text = "must be auto for architecture mixtral, whose layers are all sparse"
            yield self.fault("moe_layers", rule_text, "take architecture: qwen3_moe")
        elif self.architecture == "switch" and not switch_step(self.num_layers, self.expert_layers):
            rule_text = (
                "must be 1, 1 + n, 1 + 2n, … for architecture switch (transformers' class has no other), and as many "
                "as num_layers // n"
            )
            yield self.fault("moe_layers", rule_text, "auto, or take architecture: t5_moe")

    @rule("architecture", "num_experts", "experts_per_token")
    def _tokens_find_their_experts(self) -> Iterator[Fault]:
        if self.top_k > self.num_experts:
            yield self.fault("experts_per_token", f"must be at most num_experts = {self.num_experts}")
        elif self.architecture == "switch" and self.top_k != 1:
            rule_text = "must be 1 for architecture switch"
            yield self.fault("experts_per_token", rule_text, "auto, or take architecture: t5_moe")

    @rule("architecture", "ffn_hidden_size", "moe_ffn_hidden_size")
    def _experts_are_as_wide_as_dense_layers(self) -> Iterator[Fault]:
        if self.architecture == "switch" and self.expert_ffn_size != self.ffn_size:
            rule_text = f"must be that of the dense layers, {self.ffn_size}, for architecture switch"
            yield self.fault("moe_ffn_hidden_size", rule_text, "auto")

    @rule("architecture", "relative_attention_num_buckets", "relative_attention_max_distance")
    def _distances_fill_the_buckets(self) -> Iterator[Fault]:
        exact = self.relative_attention_num_buckets // 2
        if self.traits.positions == "relative" and self.relative_attention_max_distance <= exact:
            rule_text = f"must be more than {exact}: half of relative_attention_num_buckets are for single distances"
            yield self.fault("relative_attention_max_distance", rule_text, f"try {8 * exact}")

    @rule("architecture", "seq_len")
    def _a_span_fits(self) -> Iterator[Fault]:
        if self.traits.objective != "causal" and self.seq_len < 3:
            yield self.fault("seq_len", "must be at least 3: a token, the sentinel of a gap, and an end", "try 128")
