"""Facts about a model's parameters by name: how tensor parallelism partitions each, which the optimizers tell apart.

Pure Python: nothing here imports torch, so that memory and optimizers can be planned before anything heavy is loaded.
Letters: D hidden size, H heads, K kv heads, E head dim, F feed-forward size.
"""

from __future__ import annotations

import math
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from zerokara.model.shapes import ModelShape, TensorShape


class Partition(Enum):
    """How a parameter is partitioned among tensor-parallel ranks."""

    ROWS = "rows"
    GATED_ROWS = "gated rows"
    COLUMNS = "columns"
    REPLICATED = "replicated"


_PARTITIONS = {
    **dict.fromkeys(
        ("word_embeddings", "linear_qkv", "linear_q", "linear_kv", "linear_fc1", "output_layer"), Partition.ROWS
    ),
    **dict.fromkeys(("linear_proj", "linear_fc2"), Partition.COLUMNS),
    **dict.fromkeys(("position_embeddings", "relative_attention_bias"), Partition.REPLICATED),
    **dict.fromkeys(("input_layernorm", "q_layernorm", "k_layernorm", "final_layernorm"), Partition.REPLICATED),
    **dict.fromkeys(("pre_cross_attn_layernorm", "pre_mlp_layernorm"), Partition.REPLICATED),
    **dict.fromkeys(("router", "experts_fc1", "experts_fc2"), Partition.REPLICATED),
}
"""By the last module in a parameter's name."""


def partition_of(name: str, gated: bool) -> Partition:
    """The partition of the parameter `name`; `gated` is whether `linear_fc1` holds a gate (`Architecture.gated`).

    Raises:
        KeyError: the table does not know the parameter.
    """
    module, kind = name.split(".")[-2:]
    partition = _PARTITIONS[module]
    if partition is Partition.COLUMNS and kind == "bias":
        return Partition.REPLICATED  # added once to the sum over the ranks
    return Partition.GATED_ROWS if gated and module == "linear_fc1" else partition


def local_sizes(shape: ModelShape, tensor_parallel_size: int) -> dict[str, int]:
    """Number of weights of each parameter that one tensor-parallel rank holds."""
    gated, sizes = shape.traits.gated, {}
    for name, of_whole in shape.parameter_shapes().items():
        is_whole = partition_of(name, gated) is Partition.REPLICATED
        sizes[name] = math.prod(of_whole) // (1 if is_whole else tensor_parallel_size)
    return sizes


def is_layer_matrix(name: str, shape: TensorShape) -> bool:
    """Whether a parameter is a matrix of a layer, or one for each expert: no embedding, norm or bias."""
    return ".layers." in name and len(shape) > 1


def is_relative_position_bias(name: str) -> bool:
    """Whether a parameter is a table of relative position biases."""
    return name.endswith("relative_attention_bias.weight")


def row_blocks(name: str, shape: ModelShape) -> tuple[NDArray[np.int64], ...]:
    """The rows of each matrix that the parameter `name` (or each of its experts) holds; empty where it is one matrix.

    An optimizer that treats a matrix as a whole must see them apart. Example, K = 1, two heads of size 1: `linear_qkv`
    has the rows q q k v, and so the blocks (0 1), (2), (3).
    """
    if "linear_qkv" in name:
        kv_heads, queries = shape.num_kv_heads, shape.num_attn_heads // shape.num_kv_heads
        rows = np.arange(kv_heads * (queries + 2) * shape.head_dim).reshape(kv_heads, queries + 2, shape.head_dim)
        return rows[:, :queries].reshape(-1), rows[:, queries].reshape(-1), rows[:, queries + 1].reshape(-1)
    if "linear_kv" in name:
        rows = np.arange(2 * shape.query_projection_size).reshape(shape.num_attn_heads, 2, shape.head_dim)
        return rows[:, 0].reshape(-1), rows[:, 1].reshape(-1)
    if "_fc1" in name and shape.traits.gated:
        inner = shape.moe_ffn_hidden_size if "experts" in name else shape.ffn_hidden_size
        gate, up = np.split(np.arange(2 * inner), 2)
        return gate, up
    return ()
