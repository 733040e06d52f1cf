"""The shape of a model: all that fixes its weights and its arithmetic, and what follows by counting.

Pure Python: nothing here imports torch, so that a size can be told before anything heavy is loaded.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from zerokara.config import PretrainConfig
from zerokara.config.architectures import ARCHITECTURES, Architecture
from zerokara.progress import count_text

VOCABULARY_MULTIPLE = 128
"""Rows of the embedding are padded to a multiple of this: matrix products run faster on whole tiles."""


@dataclass(frozen=True)
class ModelShape:
    """One model. Letters: L layers, D width, H heads, K kv heads, E head width, F feed-forward, V rows, S sequence.

    One that encodes (t5) has L layers in its encoder and L in its decoder.
    """

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
    """Of the initial weights; 0 stands for T5's rule, by the widths."""
    head_dim: int = 0
    """E; 0 stands for D / H."""
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    raw_len: int = 0
    """Tokens of the corpus that one training sample takes; 0 stands for S."""
    target_len: int = 0
    """Tokens of it that are predicted; 0 stands for S."""
    num_experts: int = 0
    """Of each sparse layer."""
    experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    """Inner width of an expert."""
    moe_layers: tuple[int, ...] = ()
    """The layers that hold experts, counted from 0; of each stack."""

    def __post_init__(self) -> None:
        for name, value in (
            ("head_dim", self.hidden_size // self.num_attn_heads),
            ("raw_len", self.seq_len),
            ("target_len", self.seq_len),
        ):
            if not getattr(self, name):
                object.__setattr__(self, name, value)

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
            tie_word_embeddings=config.ties_embeddings,
            rope_theta=config.rope_theta,
            norm_epsilon=config.epsilon,
            init_std=config.initial_std,
            head_dim=config.head_width,
            relative_attention_num_buckets=config.relative_attention_num_buckets,
            relative_attention_max_distance=config.relative_attention_max_distance,
            raw_len=config.lengths.raw,
            target_len=config.lengths.target,
            num_experts=config.num_experts if config.sparse else 0,
            experts_per_token=config.top_k,
            moe_ffn_hidden_size=config.expert_size if config.sparse else 0,
            moe_layers=config.sparse,
        )

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ModelShape:
        """The inverse of `as_json`."""
        return cls(**{**values, "moe_layers": tuple(values.get("moe_layers", ()))})

    def as_json(self) -> dict[str, Any]:
        """The shape as JSON values."""
        return {**asdict(self), "moe_layers": list(self.moe_layers)}

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def traits(self) -> Architecture:
        """What the architecture is made of."""
        return ARCHITECTURES[self.architecture]

    @property
    def query_projection_size(self) -> int:
        """Width of all heads together, H·E."""
        return self.num_attn_heads * self.head_dim

    @property
    def kv_projection_size(self) -> int:
        """Width of all kv heads together, K·E."""
        return self.num_kv_heads * self.head_dim

    def num_parameters(self, padded: bool = True) -> int:
        """Trained numbers, the padding rows of the vocabulary included or (as exported) not."""
        rows = self.padded_vocab_size if padded else self.vocab_size
        embeddings = rows * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        layers = self.num_layers * self._layer_parameters() + self._num_sparse * self._experts_over_dense(
            self.num_experts
        )
        return embeddings + self._positions() + layers + self._last_norms()

    def num_active_parameters(self) -> int:
        """Of those, padding left out, the ones that one token meets: all, but of the experts the ones it takes."""
        if not self.moe_layers:
            return self.num_parameters(padded=False)
        idle = (self.num_experts - self.experts_per_token) * self._expert_matrices()
        return self.num_parameters(padded=False) - self._num_sparse * idle

    @property
    def size_text(self) -> str:
        """The parameters, for people; where a token meets only some of them, those too."""
        text = f"{count_text(self.num_parameters(padded=False))} parameters"
        return f"{text}, {count_text(self.num_active_parameters())} active" if self.moe_layers else text

    def flops_per_token(self) -> float:
        """Floating-point operations of training on one token of the corpus, forward and backward.

        Six for each weight that takes part in a matrix product (the output projection included, embedding look-ups
        not), and 12·H·E·S for the attention scores, halved where they are causal. Source: PaLM (Chowdhery et al.,
        2022), appendix B, with the causal half counted as FlashAttention's benchmarks do. Where an encoder reads and a
        decoder writes, each weight counts for the tokens that it multiplies.
        """
        read, written = self.seq_len, self.target_len
        output = self.padded_vocab_size * self.hidden_size
        layers = self.num_layers * (self._attention_matrices() + self._mlp_matrices())
        layers += len(self.moe_layers) * self._experts_over_dense(self.experts_per_token)
        if not self.traits.is_encoder_decoder:
            return 6.0 * (layers + output) + 6.0 * self.num_layers * self.query_projection_size * read
        width, heads = self.hidden_size, self.query_projection_size
        encoder = 6.0 * read * layers + 12.0 * self.num_layers * heads * read * read
        # Looking at the encoder: queries and the way out for each written token, keys and values for each read one.
        looking = 6.0 * self.num_layers * (2 * width * heads * written + 2 * width * heads * read)
        looking += 12.0 * self.num_layers * heads * read * written
        decoder = 6.0 * written * layers + 6.0 * self.num_layers * heads * written * written
        return (encoder + looking + decoder + 6.0 * written * output) / self.raw_len

    def _positions(self) -> int:
        if self.traits.positions == "learned":
            return self.seq_len * self.hidden_size
        if self.traits.positions == "relative":  # one table in the encoder, one in the decoder
            return 2 * self.relative_attention_num_buckets * self.num_attn_heads
        return 0

    def _norm_parameters(self) -> int:
        return self.hidden_size * (2 if self.traits.has_biases else 1)

    def _last_norms(self) -> int:
        return self._norm_parameters() * (2 if self.traits.is_encoder_decoder else 1)

    def _layer_norms(self) -> int:
        return 2 * self._norm_parameters() + (2 * self.head_dim if self.traits.qk_norm else 0)

    def _layer_biases(self) -> int:
        if not self.traits.has_biases:
            return 0
        return (
            self.query_projection_size
            + 2 * self.kv_projection_size
            + self.hidden_size
            + self.ffn_hidden_size
            + self.hidden_size
        )

    def _attention_matrices(self) -> int:
        return self.hidden_size * (2 * self.query_projection_size + 2 * self.kv_projection_size)

    def _mlp_matrices(self) -> int:
        return (3 if self.traits.gated else 2) * self.hidden_size * self.ffn_hidden_size

    @property
    def _num_sparse(self) -> int:
        """Sparse layers of all stacks."""
        return len(self.moe_layers) * (2 if self.traits.is_encoder_decoder else 1)

    def _expert_matrices(self) -> int:
        return (3 if self.traits.gated else 2) * self.hidden_size * self.moe_ffn_hidden_size

    def _experts_over_dense(self, num_experts: int) -> int:
        """Matrices of so many experts and their router, less those of the dense layer whose place they take."""
        return num_experts * self._expert_matrices() + self.num_experts * self.hidden_size - self._mlp_matrices()

    def _layer_parameters(self) -> int:
        """Of one dense layer; where there is an encoder, of one of its layers and one of the decoder's."""
        each = self._attention_matrices() + self._mlp_matrices() + self._layer_norms() + self._layer_biases()
        if not self.traits.is_encoder_decoder:
            return each
        return 2 * each + 4 * self.hidden_size * self.query_projection_size + self._norm_parameters()
