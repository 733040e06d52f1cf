"""The shape of a model: all that fixes its weights and its arithmetic, and what follows from it, without torch.

Of each parameter by name: its shape, how tensor parallelism partitions it, and what optimizers must tell apart. Of the
loss: the chunks of tokens in which it is computed (`model.loss`), and the memory that it takes.

megatron-core stores matrices that multiply the same input as one: `linear_qkv` holds for each kv head its queries, its
key and its value, one under the other; `linear_kv` for each head its key and its value; a gated `linear_fc1` is
[gate; up]. Nothing here imports torch, so that sizes, memory and optimizers can be planned before it is loaded.

Letters: L layers, D hidden size, H heads, K kv heads, E head dim, F feed-forward size, V rows of the vocabulary, S
sequence length, X experts, N tokens, C tokens of a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from zerokara.base.progress import count_text
from zerokara.config.model import ARCHITECTURES, Architecture, ModelSettings, RopeScaling

VOCABULARY_NAMES = ("word_embeddings.weight", "output_layer.weight")
"""Ends of the names of the matrices that have a row for each piece."""
VOCABULARY_MULTIPLE = 128
"""Rows of the embedding are padded to a multiple of this: matrix products run faster on whole tiles."""

TensorShape = tuple[int, ...]


@dataclass(frozen=True)
class ModelShape:
    architecture: str
    """A key of `ARCHITECTURES`."""
    num_layers: int
    """L; an encoder-decoder has L layers in its encoder and L in its decoder."""
    hidden_size: int
    """D, the size of the residual stream."""
    num_attn_heads: int
    """H, query heads."""
    num_kv_heads: int
    """K, key and value heads; divides H."""
    ffn_hidden_size: int
    """F, of the dense layers."""
    seq_len: int
    """S, tokens of the model's input: of the encoder's, where there is one."""
    vocab_size: int
    """Entries of the tokenizer's vocabulary; the rows behind them are padding and never win."""
    tie_word_embeddings: bool
    """True if the output projection is the embedding matrix."""
    rope_theta: float
    """Base of the rotary frequencies; has no effect with other positions."""
    norm_epsilon: float
    """Added to the variance in norms."""
    init_std: float
    """Standard deviation of the initial weights; 0 stands for T5's rule (`initial_weights`)."""
    head_dim: int = 0
    """E; 0 stands for D / H."""
    relative_attention_num_buckets: int = 32
    """Buckets of distances that share one relative position bias."""
    relative_attention_max_distance: int = 128
    """Distance in tokens from which on all share the last bucket."""
    raw_len: int = 0
    """Tokens of the corpus in one training sample; 0 stands for S."""
    input_len: int = 0
    """Input tokens of a training sample, S or fewer; 0 stands for S."""
    target_len: int = 0
    """Tokens that a training sample predicts: the decoder's length in an encoder-decoder; 0 stands for S."""
    num_experts: int = 0
    """X, of each MoE layer."""
    experts_per_token: int = 0
    """Experts that the router gives each token."""
    moe_ffn_hidden_size: int = 0
    """F of one expert."""
    moe_layers: tuple[int, ...] = ()
    """The layers with experts, counted from 0; the same in encoder and decoder."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies."""

    def __post_init__(self) -> None:
        lengths = dict.fromkeys(("raw_len", "input_len", "target_len"), self.seq_len)
        for name, value in {"head_dim": self.hidden_size // self.num_attn_heads, **lengths}.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)

    @classmethod
    def from_config(cls, config: ModelSettings, vocab_size: int) -> ModelShape:
        return cls(
            architecture=config.architecture,
            seq_len=config.seq_len,
            vocab_size=vocab_size,
            rope_theta=config.rope_theta,
            rope_scaling=config.rope_scaling,
            relative_attention_num_buckets=config.relative_attention_num_buckets,
            relative_attention_max_distance=config.relative_attention_max_distance,
            raw_len=config.lengths.raw,
            input_len=config.lengths.input,
            target_len=config.lengths.target,
            **config.resolved_sizes(),
        )

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ModelShape:
        return TypeAdapter(cls).validate_python(values)

    def as_json(self) -> dict[str, Any]:
        return dict(TypeAdapter(ModelShape).dump_python(self, mode="json"))

    @property
    def padded_vocab_size(self) -> int:
        """V, rows of the embedding."""
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def traits(self) -> Architecture:
        """The choices of the architecture."""
        return ARCHITECTURES[self.architecture]

    @property
    def query_projection_size(self) -> int:
        """Size of all query heads together, H·E."""
        return self.num_attn_heads * self.head_dim

    @property
    def kv_projection_size(self) -> int:
        """Size of all key heads (or value heads) together, K·E."""
        return self.num_kv_heads * self.head_dim

    def num_parameters(self, padded: bool = True) -> int:
        """Number of trained weights, with the padding rows of the vocabulary or (as exported) without."""
        total = sum(map(math.prod, self.parameter_shapes().values()))
        padding = (self.padded_vocab_size - self.vocab_size) * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return total if padded else total - padding

    def num_active_parameters(self) -> int:
        """Number of weights that one token uses, padding left out: of the experts those that it is routed to."""
        shapes = self.parameter_shapes().items()
        idle = sum(math.prod(shape) - self._active(name, shape) for name, shape in shapes)
        return self.num_parameters(padded=False) - idle

    @property
    def size_text(self) -> str:
        """The number of parameters for display, with experts the active ones too."""
        text = f"{count_text(self.num_parameters(padded=False))} parameters"
        return f"{text}, {count_text(self.num_active_parameters())} active" if self.moe_layers else text

    def flops_per_token(self, causal_pairs: float | None = 0.0) -> float:
        """Floating-point operations of training on one token of the corpus, forward and backward.

        Six for each weight and each token that it multiplies (the output projection included, embedding look-ups not),
        and 12·H·E·S in each layer for the attention scores of a token, as PaLM counts them (Chowdhery et al., 2022,
        appendix B). Of causal attention half of it is counted, as FlashAttention's benchmarks do, or within documents
        less: `causal_pairs` of a sample (`Batch.num_pairs`), 0 for those of one document; None counts all.
        """
        read, target = self.input_len, self.target_len
        products: float = self.padded_vocab_size * self.hidden_size * target
        for name, shape in self.parameter_shapes().items():
            if ".layers." in name and len(shape) > 1:
                of_encoder = name.startswith("encoder.") or "cross_attention.linear_kv" in name
                products += self._active(name, shape) * (read if of_encoder else target)
        pairs = 2.0 * target * target if causal_pairs is None else causal_pairs or target * target
        if self.traits.is_encoder_decoder:
            pairs += 2 * read * read + 2 * read * target
        products += self.num_layers * self.query_projection_size * pairs
        return 6.0 * products / self.raw_len

    def parameter_shapes(self) -> dict[str, TensorShape]:
        """Name and shape of every parameter, unpartitioned, the vocabulary padded. Tested against a built model."""
        vocabulary = (self.padded_vocab_size, self.hidden_size)
        found: dict[str, TensorShape] = {"embedding.word_embeddings.weight": vocabulary}
        stacks = ("encoder", "decoder") if self.traits.is_encoder_decoder else ("decoder",)
        if self.traits.positions == "learned":
            found["embedding.position_embeddings.weight"] = (self.seq_len, self.hidden_size)
        elif self.traits.positions == "relative":
            table = (self.relative_attention_num_buckets, self.num_attn_heads)
            found |= {f"{stack}_relative_pos_emb.relative_attention_bias.weight": table for stack in stacks}
        for stack in stacks:
            has_cross_attention = stack == "decoder" and len(stacks) == 2
            for layer in range(self.num_layers):
                of_layer = self._layer_shapes(has_cross_attention, has_experts=layer in self.moe_layers)
                found |= {f"{stack}.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
            found |= self._norm_shapes(f"{stack}.final_layernorm")
        if not self.tie_word_embeddings:
            found["output_layer.weight"] = vocabulary
        return found

    def _layer_shapes(self, has_cross_attention: bool, has_experts: bool) -> dict[str, TensorShape]:
        hidden, queries = self.hidden_size, self.query_projection_size
        rising = 2 if self.traits.gated else 1
        norms = ["input_layernorm", "pre_mlp_layernorm"]
        if self.traits.norms_outputs:
            norms = ["self_attention.linear_proj.output_layernorm", "mlp.linear_fc2.output_layernorm"]
        matrices = {
            "self_attention.linear_proj": (hidden, queries),
            "self_attention.linear_qkv": (queries + 2 * self.kv_projection_size, hidden),
        }
        if has_cross_attention:
            norms.append("pre_cross_attn_layernorm")
            matrices["cross_attention.linear_proj"] = (hidden, queries)
            matrices["cross_attention.linear_q"] = (queries, hidden)
            matrices["cross_attention.linear_kv"] = (2 * queries, hidden)
        if not has_experts:
            matrices["mlp.linear_fc1"] = (self.ffn_hidden_size * rising, hidden)
            matrices["mlp.linear_fc2"] = (hidden, self.ffn_hidden_size)
        found: dict[str, TensorShape] = {}
        for norm in norms:
            found |= self._norm_shapes(norm)
        for name, shape in matrices.items():
            found[f"{name}.weight"] = shape
            if self.traits.has_biases or (self.traits.has_qkv_biases and "linear_qkv" in name):
                found[f"{name}.bias"] = shape[:1]
        if has_experts:
            found["mlp.router.weight"] = (self.num_experts, hidden)
            found["mlp.experts_fc1.weight"] = (self.num_experts, self.moe_ffn_hidden_size * rising, hidden)
            found["mlp.experts_fc2.weight"] = (self.num_experts, hidden, self.moe_ffn_hidden_size)
        if self.traits.qk_norm:
            together = self.traits.qk_norm == "projection"
            sizes = (self.query_projection_size, self.kv_projection_size) if together else (self.head_dim,) * 2
            found |= {f"self_attention.{one}_layernorm.weight": (size,) for one, size in zip("qk", sizes, strict=True)}
        return found

    def _norm_shapes(self, name: str) -> dict[str, TensorShape]:
        kinds = ("weight", "bias") if self.traits.has_biases else ("weight",)
        return {f"{name}.{kind}": (self.hidden_size,) for kind in kinds}

    def partition(self, name: str) -> Partition | None:
        """The partition of the parameter `name`; None if every tensor-parallel rank holds all of it."""
        module, kind = name.split(".")[-2:]
        if module in _BY_ROWS:
            return Partition(0, blocks=2 if self.traits.gated and module == "linear_fc1" else 1)
        # A bias of the others is added once to the sum over the ranks.
        return Partition(1) if module in _BY_COLUMNS and kind == "weight" else None

    def _active(self, name: str, shape: TensorShape) -> int:
        """Numbers of a parameter that one token uses."""
        is_experts = "mlp.experts_" in name
        return math.prod(shape) * self.experts_per_token // self.num_experts if is_experts else math.prod(shape)


class Partition(NamedTuple):
    """Partition of a parameter among T tensor-parallel ranks: each has a T-th of a dimension, of each of its blocks."""

    dim: int
    blocks: int = 1
    """Equal blocks of that dimension: the gate and the other projection of a gated `linear_fc1`."""


_BY_ROWS = "word_embeddings", "output_layer", "linear_qkv", "linear_q", "linear_kv", "linear_fc1"
_BY_COLUMNS = "linear_proj", "linear_fc2"
"""Modules with partitioned parameters; all others are replicated."""


def local_sizes(shape: ModelShape, tensor_parallel_size: int) -> dict[str, int]:
    """Number of weights of each parameter that one tensor-parallel rank holds."""
    return {
        name: math.prod(of_whole) // (tensor_parallel_size if shape.partition(name) else 1)
        for name, of_whole in shape.parameter_shapes().items()
    }


def is_layer_matrix(name: str, shape: TensorShape) -> bool:
    """True for a matrix of a layer, or one for each expert: no embedding, norm or bias."""
    return ".layers." in name and len(shape) > 1


def parts_of(matrix_RC: Any, name: str, shape: ModelShape) -> Any:
    """Views of the matrices that one of the parameter `name` joins, [groups, rows of each group, C].

    An optimizer that treats a matrix as a whole must see them apart. Example, K = 2, four heads of size 1: `linear_qkv`
    has the rows q q k v q q k v; its parts are [2, 2, C], [2, 1, C] and [2, 1, C].
    """
    groups, parts = 1, [1]
    if "linear_qkv" in name:
        groups, parts = shape.num_kv_heads, [shape.num_attn_heads // shape.num_kv_heads, 1, 1]
    elif "linear_kv" in name:
        groups, parts = shape.num_attn_heads, [1, 1]
    elif "_fc1" in name and shape.traits.gated:
        parts = [1, 1]
    grouped = matrix_RC.view(groups, -1, matrix_RC.shape[-1])
    rows = grouped.shape[1] // sum(parts)
    return grouped.split([rows * each for each in parts], 1)


CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Memory for one chunk of fp32 logits, enough for full matrix products: on a CPU those of 128 rows, 16 MiB of a
vocabulary of 32,000, ran at two thirds of the speed of those of 512."""

LEAST_ROWS = {"cpu": 1, "cuda": 4096}
"""C at least, however large the vocabulary. On a GPU each chunk reads and writes the fp32 gradient of the weight, which
takes as long as a product of some 800 rows (H100: 3.35 TB/s, 700 TFLOP/s): of 4,096 rows a fifth of it."""

BLOCK_BYTES = 2 * 2**20
"""Memory for the rows of a chunk that a CPU takes the softmax of at a time, in fp32: they stay in its cache through all
passes over them. For 2,048 rows of 8,064 on a core of an EPYC the softmax took 42 ms, and 31 so (bf16)."""

TILE_ROWS = 64
"""Large chunks are whole multiples of this: a GPU computes products in tiles, and a partial tile costs a whole one."""


def chunk_rows(device_type: str, num_tokens: int, num_rows: int) -> int:
    """Return C, about equal in all chunks: no small one is left over."""
    most_rows = max(LEAST_ROWS[device_type], CHUNK_BYTES[device_type] // (4 * num_rows))
    num_chunks = max(1, -(-num_tokens // most_rows))
    rows = max(1, -(-num_tokens // num_chunks))
    return -(-rows // TILE_ROWS) * TILE_ROWS if rows > 4 * TILE_ROWS else rows


def block_rows(device_type: str, chunk: int, num_rows: int) -> int:
    """Return the rows of a chunk that the uncompiled softmax works on at a time."""
    return min(chunk, max(1, BLOCK_BYTES // (4 * num_rows))) if device_type == "cpu" else chunk


def loss_bytes(
    device_type: str, num_tokens: int, num_rows: int, hidden_size: int, number_bytes: int, is_fused: bool
) -> int:
    """Return the most bytes that the loss and its gradients take at a time, beside what the layers keep.

    A number of the computation has `number_bytes`; `is_fused` says that the softmax is compiled.
    """
    rows = chunk_rows(device_type, num_tokens, num_rows)
    converted = number_bytes if number_bytes < 4 else 0  # beside fp32
    weight = num_rows * hidden_size
    hidden = number_bytes * num_tokens * hidden_size  # their gradient
    # A chunk's gradient of the weight, before it is added (`weight_gradients.adds_in_fp32`).
    product = converted * weight if device_type == "cpu" else 0
    if device_type == "cpu":
        hidden *= 2  # and a copy in the order of the labels (`layers`)
    # Logits and their gradient; or both in one place, and where that is not in fp32, meanwhile a block that is.
    block = 4 * block_rows(device_type, rows, num_rows) * num_rows if converted else 0
    of_rows = number_bytes * rows * num_rows
    chunk = 2 * of_rows + product if is_fused else of_rows + max(block, product)
    # At the end no chunk is left, and the gradient of the weight is converted.
    return hidden + 4 * weight + max(chunk, converted * weight)
