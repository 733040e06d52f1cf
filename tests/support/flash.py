"""FlashAttention for documents of many lengths on a CPU: torch's two operators, which only a GPU has, in plain ones.

All that lies above them in torch (torch/nn/attention/varlen.py) is torch's own: arguments, autograd, what its compiler
sees.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def install() -> None:
    """Give the operators to the CPU, for the life of the process."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    _kept.append(library)


_kept: list[Any] = []


def _scores(query_PHE: Tensor, key_PKE: Tensor, offsets_N1: Tensor, scale: float | None) -> Tensor:
    """Scaled scores [H, P, P], -inf where a position does not attend."""
    rows_P = torch.arange(query_PHE.size(0), device=query_PHE.device)
    document_P = torch.searchsorted(offsets_N1, rows_P.int(), right=True)
    attends_PP = (document_P[:, None] == document_P) & (rows_P <= rows_P[:, None])
    scores_HPP = query_PHE.float().transpose(0, 1) @ _for_each_query(query_PHE, key_PKE).permute(1, 2, 0)
    return (scores_HPP * (scale or query_PHE.size(2) ** -0.5)).masked_fill(~attends_PP, float("-inf"))


def _for_each_query(query_PHE: Tensor, heads_PKE: Tensor) -> Tensor:
    return heads_PKE.float().repeat_interleave(query_PHE.size(1) // heads_PKE.size(1), dim=1)


def _attend(query_PHE: Tensor, key_PKE: Tensor, value_PKE: Tensor, offsets_N1: Tensor, scale: float | None) -> Tensor:
    weights_HPP = _scores(query_PHE, key_PKE, offsets_N1, scale).softmax(dim=-1)
    out_HPE = weights_HPP @ _for_each_query(query_PHE, value_PKE).transpose(0, 1)
    return out_HPE.transpose(0, 1).to(query_PHE.dtype).contiguous()


def _forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert is_causal and dropout_p == 0 and cum_seq_q.dtype == torch.int32 and max_q == max_k
    log_sums_HP = _scores(query, key, cum_seq_q, scale).logsumexp(dim=-1)
    nothing = query.new_empty(0)
    return _attend(query, key, value, cum_seq_q, scale), log_sums_HP, nothing, nothing.clone(), nothing.clone()


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor,
    cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor,
    *, scale: float | None = None, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """By the formulas: dS = P · (dP − Σ dO · O)."""
    weights_HPP = (_scores(query, key, cum_seq_q, scale) - logsumexp[..., None]).exp()
    grad_HPE, repeats = grad_out.float().transpose(0, 1), query.size(1) // key.size(1)
    grad_value_HPE = weights_HPP.transpose(1, 2) @ grad_HPE
    grad_weights_HPP = grad_HPE @ _for_each_query(query, value).permute(1, 2, 0)
    mean_HP1 = (grad_out.float() * out.float()).sum(dim=-1).transpose(0, 1)[..., None]
    grad_scores_HPP = weights_HPP * (grad_weights_HPP - mean_HP1) * (scale or query.size(2) ** -0.5)
    grad_query_HPE = grad_scores_HPP @ _for_each_query(query, key).transpose(0, 1)
    grad_key_HPE = grad_scores_HPP.transpose(1, 2) @ query.float().transpose(0, 1)

    def summed(grad_HPE: Tensor) -> Tensor:
        return grad_HPE.unflatten(0, (-1, repeats)).sum(dim=1).transpose(0, 1).to(key.dtype).contiguous()

    return grad_query_HPE.transpose(0, 1).to(query.dtype).contiguous(), summed(grad_key_HPE), summed(grad_value_HPE)
