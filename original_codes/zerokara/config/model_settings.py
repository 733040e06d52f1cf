"""What fixes the shape of a model, in `config.yaml`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from zerokara.config.settings import Auto, PositiveNumber, PositiveWhole, Settings, rule
from zerokara.errors import Fault


class ModelSettings(Settings):
    """The model."""

    title: ClassVar[str] = "The model"

    architecture: Literal["llama", "qwen3", "gpt2"] = "llama"
    """`llama` (RMSNorm, SwiGLU, rotary positions, grouped queries), `qwen3` (the same, and each head's queries and keys
    are normed: steadier at high learning rates) or `gpt2` (LayerNorm, GELU, learned positions)."""
    num_layers: PositiveWhole = 6
    """Transformer layers."""
    hidden_size: PositiveWhole = 256
    """Width of the model; a multiple of num_attn_heads."""
    num_attn_heads: PositiveWhole = 4
    """Attention heads."""
    num_kv_heads: PositiveWhole | Auto = "auto"
    """Key and value heads shared among the attention heads (not gpt2); `auto` is one for each."""
    ffn_hidden_size: PositiveWhole | Auto = "auto"
    """Inner width of the feed-forward layers; `auto` is 8/3 of hidden_size rounded up to 64, for gpt2 4 times."""
    seq_len: PositiveWhole = 256
    """Tokens in a training sequence, and the longest text the model can read."""
    tie_word_embeddings: bool = True
    """Use one matrix for reading and for predicting tokens: fewer parameters, good for small models."""
    rope_theta: PositiveNumber = 10000.0
    """Base of the rotary positions (not gpt2); larger for long sequences."""
    norm_epsilon: PositiveNumber = 1e-5
    """Added to the variance in normalisations."""
    init_std: PositiveNumber = 0.02
    """Standard deviation of the initial weights."""

    @property
    def kv_heads(self) -> int:
        """Key and value heads with `auto` resolved."""
        return self.num_attn_heads if self.num_kv_heads == "auto" else self.num_kv_heads

    @property
    def ffn_size(self) -> int:
        """Inner feed-forward width with `auto` resolved."""
        if self.ffn_hidden_size != "auto":
            return self.ffn_hidden_size
        if self.architecture == "gpt2":
            return 4 * self.hidden_size
        return -(-8 * self.hidden_size // (3 * 64)) * 64

    @rule("hidden_size", "num_attn_heads")
    def _heads_divide_width(self) -> Iterator[Fault]:
        if self.hidden_size % self.num_attn_heads:
            lower = self.hidden_size // self.num_attn_heads * self.num_attn_heads
            remedy = f"try {lower or self.num_attn_heads} or {lower + self.num_attn_heads}"
            yield self.fault("hidden_size", f"must be a multiple of num_attn_heads = {self.num_attn_heads}", remedy)

    @rule("architecture", "hidden_size", "num_attn_heads")
    def _rotary_needs_even_heads(self) -> Iterator[Fault]:
        if self.architecture != "gpt2" and self.hidden_size % (2 * self.num_attn_heads) == self.num_attn_heads:
            width = self.hidden_size // self.num_attn_heads
            yield self.fault("hidden_size", f"must give heads of even width for rotary positions; they have {width}")

    @rule("num_attn_heads", "num_kv_heads", "architecture")
    def _kv_heads_divide_heads(self) -> Iterator[Fault]:
        if self.num_attn_heads % self.kv_heads:
            divisors = [n for n in range(1, self.num_attn_heads + 1) if self.num_attn_heads % n == 0]
            rule_text = f"must divide num_attn_heads = {self.num_attn_heads}"
            yield self.fault("num_kv_heads", rule_text, f"one of {divisors}")
        elif self.architecture == "gpt2" and self.kv_heads != self.num_attn_heads:
            yield self.fault("num_kv_heads", "must be auto for architecture gpt2, which does not share heads")
