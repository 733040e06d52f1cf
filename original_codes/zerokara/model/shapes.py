"""The shape of a model: all that fixes its weights and its arithmetic, and what follows by counting.

Pure Python: nothing here imports torch, so that a size can be told before anything heavy is loaded.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from zerokara.config import PretrainConfig

VOCABULARY_MULTIPLE = 128
"""Rows of the embedding are padded to a multiple of this: matrix products run faster on whole tiles."""


@dataclass(frozen=True)
class ModelShape:
    """One decoder-only model. Letters: L layers, D width, H heads, K kv heads, E head width, F feed-forward, V rows."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_attn_heads: int
    num_kv_heads: int
    ffn_hidden_size: int
    seq_len: int
    vocab_size: int
    """Pieces of the tokenizer; the rows behind them are padding and never win."""
    tie_word_embeddings: bool
    rope_theta: float
    norm_epsilon: float
    init_std: float

    @classmethod
    def from_config(cls, config: PretrainConfig, vocab_size: int) -> ModelShape:
        """The shape that a configuration and a tokenizer make."""
        return cls(
            architecture=config.architecture,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_attn_heads=config.num_attn_heads,
            num_kv_heads=config.kv_heads,
            ffn_hidden_size=config.ffn_size,
            seq_len=config.seq_len,
            vocab_size=vocab_size,
            tie_word_embeddings=config.tie_word_embeddings,
            rope_theta=config.rope_theta,
            norm_epsilon=config.norm_epsilon,
            init_std=config.init_std,
        )

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ModelShape:
        """The inverse of `as_json`."""
        return cls(**values)

    def as_json(self) -> dict[str, Any]:
        """The shape as JSON values."""
        return asdict(self)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def objective(self) -> str:
        """What the model learns to predict; a key of `samples.objective.OBJECTIVES`."""
        return "causal"

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layers have a gate beside their rising matrix."""
        return self.architecture != "gpt2"

    @property
    def has_biases(self) -> bool:
        """Whether matrices and norms have a bias."""
        return self.architecture == "gpt2"

    @property
    def learns_positions(self) -> bool:
        """Whether each position has a learned vector; otherwise queries and keys are turned by their position."""
        return self.architecture == "gpt2"

    @property
    def norms_heads(self) -> bool:
        """Whether each head's queries and keys are normed, with one weight for all heads of a layer."""
        return self.architecture == "qwen3"

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attn_heads

    def num_parameters(self, padded: bool = True) -> int:
        """Trained numbers, the padding rows of the vocabulary included or (as exported) not."""
        rows = self.padded_vocab_size if padded else self.vocab_size
        embeddings = rows * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        if self.learns_positions:
            embeddings += self.seq_len * self.hidden_size
        return embeddings + self.num_layers * self._layer_parameters() + self._norm_parameters()

    def flops_per_token(self) -> float:
        """Floating-point operations of training on one token, forward and backward.

        Six for each weight that takes part in a matrix product (the output projection included, embedding look-ups
        not), and 12·L·D·S for the attention scores, halved because they are causal. Source: PaLM (Chowdhery et al.,
        2022), appendix B, with the causal half counted as FlashAttention's benchmarks do.
        """
        in_layers = self._layer_parameters() - self._layer_norms() - self._layer_biases()
        matrices = self.num_layers * in_layers + self.padded_vocab_size * self.hidden_size
        return 6.0 * matrices + 6.0 * self.num_layers * self.hidden_size * self.seq_len

    def _norm_parameters(self) -> int:
        return self.hidden_size * (2 if self.has_biases else 1)

    def _layer_norms(self) -> int:
        return 2 * self._norm_parameters() + (2 * self.head_size if self.norms_heads else 0)

    def _layer_biases(self) -> int:
        if not self.has_biases:
            return 0
        return 3 * self.hidden_size + self.hidden_size + self.ffn_hidden_size + self.hidden_size

    def _layer_parameters(self) -> int:
        width, kv_width = self.hidden_size, self.num_kv_heads * self.head_size
        attention = width * (width + 2 * kv_width) + width * width
        matrices_in_mlp = 3 if self.gated else 2
        return attention + matrices_in_mlp * width * self.ffn_hidden_size + self._layer_norms() + self._layer_biases()
