"""The inverse pairs that weight rules are made of.

A transform turns one of our tensors into one or more of Hugging Face's, and back bit by bit (only rows that pad the
vocabulary are dropped, and come back as zeros). All of them only move, drop or pad rows, so they also work on tensors
without content (device ``meta``), which is how shapes are checked.

Shape suffixes: D hidden size, H heads, K kv heads, G = H/K query heads that share a kv head, E head_dim,
F feed-forward size, V real vocabulary, P padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerokara.model.shapes import ModelShape

Parts = tuple[Tensor, ...]


@dataclass(frozen=True)
class Transform:
    """One tensor of ours ↔ the Hugging Face tensors made of it, in the order of the rule's names."""

    to_hf: Callable[[Tensor, ModelShape], Parts]
    from_hf: Callable[[Parts, ModelShape], Tensor]


def _real_rows(ours_PD: Tensor, shape: ModelShape) -> Parts:
    return (ours_PD[: shape.vocab_size],)


def _padded_rows(parts: Parts, shape: ModelShape) -> Tensor:
    # Zeros, as in a new model: a zero row adds nothing to any gradient, and its logit is masked.
    rows_VD, *_ = parts
    padding = rows_VD.new_zeros((shape.padded_vocab_size - shape.vocab_size, *rows_VD.shape[1:]))
    return torch.cat((rows_VD, padding))


def _by_kind(ours: Tensor, shape: ModelShape, sizes: Sequence[int]) -> Parts:
    """megatron-core orders rows by kv head: its query heads, if there are any, then its key, then its value."""
    rest = ours.shape[1:]
    grouped = ours.reshape(shape.num_kv_heads, sum(sizes), shape.head_dim, *rest)
    return tuple(part.reshape(-1, *rest) for part in grouped.split(tuple(sizes), dim=1))


def _queries_keys_values(ours: Tensor, shape: ModelShape) -> Parts:
    return _by_kind(ours, shape, (shape.num_attn_heads // shape.num_kv_heads, 1, 1))


def _grouped(parts: Parts, shape: ModelShape) -> Tensor:
    rest = parts[0].shape[1:]
    by_group = [part.reshape(shape.num_kv_heads, -1, shape.head_dim, *rest) for part in parts]
    return torch.cat(by_group, dim=1).reshape(-1, *rest)


def _one_qkv(ours: Tensor, shape: ModelShape) -> Parts:
    """All queries, then all keys, then all values, in one tensor (GPT-2's ``c_attn``); a weight is transposed."""
    joined = torch.cat(_queries_keys_values(ours, shape))
    return (joined.t(),) if joined.dim() == 2 else (joined,)


def _one_qkv_back(parts: Parts, shape: ModelShape) -> Tensor:
    joined = parts[0].t() if parts[0].dim() == 2 else parts[0]
    query_rows, key_rows = shape.query_projection_size, shape.kv_projection_size
    return _grouped(joined.split((query_rows, key_rows, key_rows)), shape)


def _halves_of_each_expert(ours: Tensor, shape: ModelShape) -> Parts:
    """The gate projections of all experts, then their up projections."""
    gates, ups = ours.chunk(2, dim=1)
    return (*gates.unbind(), *ups.unbind())


def _halves_of_each_expert_back(parts: Parts, shape: ModelShape) -> Tensor:
    half = len(parts) // 2
    return torch.cat((torch.stack(parts[:half]), torch.stack(parts[half:])), dim=1)


SAME = Transform(lambda ours, shape: (ours,), lambda parts, shape: parts[0])
TRANSPOSED = Transform(lambda ours, shape: (ours.t(),), lambda parts, shape: parts[0].t())
"""GPT-2's ``Conv1D`` keeps [in, out] where a linear layer keeps [out, in]."""
VOCABULARY = Transform(_real_rows, _padded_rows)
"""[P, D] ↔ [V, D]."""
COPIED_VOCABULARY = Transform(lambda ours, shape: _real_rows(ours, shape) * 3, _padded_rows)
"""[P, D] ↔ three copies of [V, D], of which the first is read back."""
QUERY_KEY_VALUE = Transform(_queries_keys_values, _grouped)
"""[K·(G+2)·E, D] ↔ [H·E, D], [K·E, D], [K·E, D]; biases alike."""
KEY_VALUE = Transform(lambda ours, shape: _by_kind(ours, shape, (1, 1)), _grouped)
"""[K·2·E, D] ↔ [K·E, D], [K·E, D]: of cross-attention."""
JOINED_QUERY_KEY_VALUE = Transform(_one_qkv, _one_qkv_back)
"""[K·(G+2)·E, D] ↔ [D, (H+2K)·E]; a bias stays one-dimensional."""
EXPERTS = Transform(lambda ours, shape: ours.unbind(), lambda parts, shape: torch.stack(parts))
"""[X, R, C] ↔ X times [R, C]."""
EXPERTS_GATE_AND_UP = Transform(_halves_of_each_expert, _halves_of_each_expert_back)
"""[X, 2F, D] ↔ X times [F, D], the gates, then X times [F, D], the up projections."""
GATE_AND_UP = Transform(lambda ours, shape: ours.chunk(2), lambda parts, shape: torch.cat(parts))
"""[2F, D] ↔ [F, D], [F, D]: megatron-core applies the activation to the first half."""
