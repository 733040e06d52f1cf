"""The parameters of a model by name: their whole shapes, which are matrices of the layers, and what matrices they hold.

megatron-core stores matrices that are multiplied by the same input as one: `linear_qkv` holds for each kv head its
queries, its key and its value, one under the other, `linear_kv` for each head its key and its value, and a gated
`linear_fc1` is [gate; up]. An optimizer that treats a
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
    vocabulary = (shape.padded_vocab_size, shape.hidden_size)
    found: dict[str, Shape] = {"embedding.word_embeddings.weight": vocabulary, **_positions(shape)}
    stacks = {"encoder": False, "decoder": True} if shape.traits.is_encoder_decoder else {"decoder": False}
    for stack, looks in stacks.items():
        for layer in range(shape.num_layers):
            parts = _layer(shape, looks, sparse=layer in shape.moe_layers)
            found |= {f"{stack}.layers.{layer}.{name}": of_one for name, of_one in parts.items()}
        found |= _norm(shape, f"{stack}.final_layernorm")
    if not shape.tie_word_embeddings:
        found["output_layer.weight"] = vocabulary
    return found


def _positions(shape: ModelShape) -> dict[str, Shape]:
    if shape.traits.positions == "learned":
        return {"embedding.position_embeddings.weight": (shape.seq_len, shape.hidden_size)}
    if shape.traits.positions == "relative":
        table = (shape.relative_attention_num_buckets, shape.num_attn_heads)
        return {f"{stack}_relative_pos_emb.relative_attention_bias.weight": table for stack in ("encoder", "decoder")}
    return {}


def _layer(shape: ModelShape, looks: bool, sparse: bool) -> dict[str, Shape]:
    """The parameters of one layer; `looks` tells whether it looks at an encoder, `sparse` whether it holds experts."""
    width, heads = shape.hidden_size, shape.query_projection_size
    linears = {
        "self_attention.linear_proj": (width, heads),
        "self_attention.linear_qkv": (heads + 2 * shape.kv_projection_size, width),
    }
    if not sparse:
        linears["mlp.linear_fc1"] = (shape.ffn_hidden_size * (2 if shape.traits.gated else 1), width)
        linears["mlp.linear_fc2"] = (width, shape.ffn_hidden_size)
    norms = ["input_layernorm", "pre_mlp_layernorm"]
    if looks:
        norms.append("pre_cross_attn_layernorm")
        linears["cross_attention.linear_proj"] = (width, heads)
        linears["cross_attention.linear_q"] = (heads, width)
        linears["cross_attention.linear_kv"] = (2 * heads, width)
    found: dict[str, Shape] = {}
    for norm in norms:
        found |= _norm(shape, norm)
    for name, (rows, columns) in linears.items():
        found[f"{name}.weight"] = (rows, columns)
        if shape.traits.has_biases:
            found[f"{name}.bias"] = (rows,)
    if sparse:
        rising = shape.moe_ffn_hidden_size * (2 if shape.traits.gated else 1)
        found["mlp.router.weight"] = (shape.num_experts, width)
        found["mlp.experts_fc1.weight"] = (shape.num_experts, rising, width)
        found["mlp.experts_fc2.weight"] = (shape.num_experts, width, shape.moe_ffn_hidden_size)
    if shape.traits.qk_norm:
        found |= {f"self_attention.{one}_layernorm.weight": (shape.head_dim,) for one in "qk"}
    return found


def _norm(shape: ModelShape, name: str) -> dict[str, Shape]:
    kinds = ("weight", "bias") if shape.traits.has_biases else ("weight",)
    return {f"{name}.{kind}": (shape.hidden_size,) for kind in kinds}


def is_layer_matrix(name: str, shape: Shape) -> bool:
    """Whether a parameter is a matrix inside a layer, or one for each expert: no embedding, head, norm or bias."""
    return ".layers." in name and len(shape) > 1


def is_distance_bias(name: str) -> bool:
    """Whether a parameter is a table of what attention scores gain by the distance of two tokens."""
    return name.endswith("relative_attention_bias.weight")


def row_blocks(name: str, shape: ModelShape) -> tuple[NDArray[np.int64], ...]:
    """The rows of each matrix that the parameter `name` (or each of its experts) holds; none where it is one matrix.

    Example, K = 1, two heads of width 1: `linear_qkv` has the rows q q k v, and so the blocks (0 1), (2), (3).
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
