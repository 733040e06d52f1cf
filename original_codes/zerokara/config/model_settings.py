"""What fixes the shape of a model, in `config.yaml`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from zerokara.config import sample_lengths
from zerokara.config.architectures import ARCHITECTURES, Architecture, Name
from zerokara.config.sample_lengths import SampleLengths
from zerokara.config.settings import Auto, PositiveNumber, PositiveWhole, Settings, rule
from zerokara.errors import Fault


class ModelSettings(Settings):
    """The model."""

    title: ClassVar[str] = "The model"

    architecture: Name = "llama"
    """`llama` (RMSNorm, SwiGLU, rotary positions, grouped queries), `qwen3` (the same, and each head's queries and keys
    are normed: steadier at high learning rates), `gpt2` (LayerNorm, GELU, learned positions) or `t5` (version 1.1: an
    encoder reads text with gaps, a decoder writes what is missing; RMSNorm, gated GELU, relative positions)."""
    num_layers: PositiveWhole = 6
    """Transformer layers; of t5 so many in the encoder and as many in the decoder."""
    hidden_size: PositiveWhole = 256
    """Width of the model; a multiple of num_attn_heads, unless head_size is given."""
    num_attn_heads: PositiveWhole = 4
    """Attention heads."""
    num_kv_heads: PositiveWhole | Auto = "auto"
    """Key and value heads shared among the attention heads (not gpt2, not t5); `auto` is one for each."""
    head_size: PositiveWhole | Auto = "auto"
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
    relative_attention_buckets: Annotated[PositiveWhole, Field(ge=4, multiple_of=4)] = 32
    """t5: kinds of distance that have a bias of their own in each head; a multiple of 4."""
    relative_attention_distance: PositiveWhole = 128
    """t5: distance in tokens from which on all are of one kind."""
    noise_density: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """t5: share of the tokens that the encoder does not see and the decoder writes."""
    mean_span_length: Annotated[float, Field(ge=1)] = 3.0
    """t5: how many of them lie together, on average. Each such gap needs a sentinel of the tokenizer (extra_ids)."""
    norm_epsilon: PositiveNumber = 1e-5
    """Added to the variance in normalisations."""
    init_std: PositiveNumber | Auto = "auto"
    """Standard deviation of the initial weights; `auto` is 0.02. t5 has a rule of its own, by the width that a matrix
    multiplies, and leaves this at auto."""

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
    def head_width(self) -> int:
        """Width of an attention head with `auto` resolved."""
        return self.hidden_size // self.num_attn_heads if self.head_size == "auto" else self.head_size

    @property
    def ties_embeddings(self) -> bool:
        """Whether one matrix reads and predicts, with `auto` resolved."""
        return not self.traits.encodes if self.tie_word_embeddings == "auto" else self.tie_word_embeddings

    @property
    def lengths(self) -> SampleLengths:
        """How many tokens a training sample takes, and how many of it are read and written."""
        if self.traits.objective == "causal":
            return sample_lengths.causal(self.seq_len)
        return sample_lengths.with_spans(self.seq_len, self.noise_density, self.mean_span_length)

    @rule("hidden_size", "num_attn_heads", "head_size")
    def _heads_divide_width(self) -> Iterator[Fault]:
        if self.head_size == "auto" and self.hidden_size % self.num_attn_heads:
            lower = self.hidden_size // self.num_attn_heads * self.num_attn_heads
            remedy = f"try {lower or self.num_attn_heads} or {lower + self.num_attn_heads}, or give head_size"
            yield self.fault("hidden_size", f"must be a multiple of num_attn_heads = {self.num_attn_heads}", remedy)

    @rule("architecture", "hidden_size", "num_attn_heads", "head_size")
    def _rotary_needs_even_heads(self) -> Iterator[Fault]:
        divides = self.head_size != "auto" or self.hidden_size % self.num_attn_heads == 0
        if self.traits.positions == "rotary" and divides and self.head_width % 2:
            key = "hidden_size" if self.head_size == "auto" else "head_size"
            yield self.fault(key, f"must give heads of even width for rotary positions; they have {self.head_width}")

    @rule("num_attn_heads", "num_kv_heads", "architecture")
    def _kv_heads_divide_heads(self) -> Iterator[Fault]:
        if self.num_attn_heads % self.kv_heads:
            divisors = [n for n in range(1, self.num_attn_heads + 1) if self.num_attn_heads % n == 0]
            rule_text = f"must divide num_attn_heads = {self.num_attn_heads}"
            yield self.fault("num_kv_heads", rule_text, f"one of {divisors}")
        elif not self.traits.shares_heads and self.kv_heads != self.num_attn_heads:
            rule_text = f"must be auto for architecture {self.architecture}, which does not share heads"
            yield self.fault("num_kv_heads", rule_text)

    @rule("architecture", "init_std")
    def _encoders_draw_by_width(self) -> Iterator[Fault]:
        if self.traits.encodes and self.init_std != "auto":
            rule_text = f"must be auto for architecture {self.architecture}, which draws each matrix by its width"
            yield self.fault("init_std", rule_text)

    @rule("architecture", "relative_attention_buckets", "relative_attention_distance")
    def _distances_fill_the_buckets(self) -> Iterator[Fault]:
        exact = self.relative_attention_buckets // 2
        if self.traits.positions == "relative" and self.relative_attention_distance <= exact:
            rule_text = f"must be more than {exact}: half of relative_attention_buckets are for single distances"
            yield self.fault("relative_attention_distance", rule_text, f"try {8 * exact}")

    @rule("architecture", "seq_len")
    def _a_span_fits(self) -> Iterator[Fault]:
        if self.traits.objective != "causal" and self.seq_len < 3:
            yield self.fault("seq_len", "must be at least 3: a token, the sentinel of a gap, and an end", "try 128")
