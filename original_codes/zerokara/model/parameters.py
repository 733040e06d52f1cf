"""The parameters of a model by name: their whole shapes, which are matrices of the layers, and what matrices they hold.

megatron-core stores matrices that are multiplied by the same input as one: `linear_qkv` holds for each kv head its
queries, its key and its value, one under the other, and a gated `linear_fc1` is [gate; up]. An optimizer that treats a
matrix as a whole must see them apart.

Pure Python: nothing here imports torch, so that what an optimizer costs can be told before anything heavy is loaded.
Tested against a built model. Letters: D width, H heads, K kv heads, E head width, F feed-forward.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zerokara.model.shapes import ModelShape

Shape = tuple[int, ...]


def parameter_shapes(shape: ModelShape) -> dict[str, Shape]:
    """Name and whole shape of every parameter, the vocabulary padded."""
    width, vocabulary = shape.hidden_size, (shape.padded_vocab_size, shape.hidden_size)
    found: dict[str, Shape] = {"embedding.word_embeddings.weight": vocabulary}
    if shape.learns_positions:
        found["embedding.position_embeddings.weight"] = (shape.seq_len, width)
    linears = {
        "self_attention.linear_proj": (width, width),
        "self_attention.linear_qkv": (width + 2 * shape.num_kv_heads * shape.head_size, width),
        "mlp.linear_fc1": (shape.ffn_hidden_size * (2 if shape.gated else 1), width),
        "mlp.linear_fc2": (width, shape.ffn_hidden_size),
    }
    norms = [f"decoder.layers.{layer}.{name}" for layer in range(shape.num_layers) for name in _LAYER_NORMS]
    for norm in [*norms, "decoder.final_layernorm"]:
        found[f"{norm}.weight"] = (width,)
        if shape.has_biases:
            found[f"{norm}.bias"] = (width,)
    for layer in range(shape.num_layers):
        for name, (rows, columns) in linears.items():
            found[f"decoder.layers.{layer}.{name}.weight"] = (rows, columns)
            if shape.has_biases:
                found[f"decoder.layers.{layer}.{name}.bias"] = (rows,)
        if shape.norms_heads:
            for norm in _HEAD_NORMS:
                found[f"decoder.layers.{layer}.{norm}.weight"] = (shape.head_size,)
    if not shape.tie_word_embeddings:
        found["output_layer.weight"] = vocabulary
    return found


_LAYER_NORMS = ("input_layernorm", "pre_mlp_layernorm")
_HEAD_NORMS = ("self_attention.q_layernorm", "self_attention.k_layernorm")


def is_layer_matrix(name: str, shape: Shape) -> bool:
    """Whether a parameter is a matrix inside a layer: no embedding, output head, norm or bias."""
    return ".layers." in name and len(shape) == 2


def row_blocks(name: str, shape: ModelShape) -> tuple[NDArray[np.int64], ...]:
    """The rows of each matrix that the parameter `name` holds; none where it is one matrix.

    Example, K = 1, two heads of width 1: `linear_qkv` has the rows q q k v, and so the blocks (0 1), (2), (3).
    """
    if "linear_qkv" in name:
        kv_heads, queries = shape.num_kv_heads, shape.num_attn_heads // shape.num_kv_heads
        rows = np.arange(kv_heads * (queries + 2) * shape.head_size).reshape(kv_heads, queries + 2, shape.head_size)
        return rows[:, :queries].reshape(-1), rows[:, queries].reshape(-1), rows[:, queries + 1].reshape(-1)
    if "linear_fc1" in name and shape.gated:
        gate, up = np.split(np.arange(2 * shape.ffn_hidden_size), 2)
        return gate, up
    return ()
