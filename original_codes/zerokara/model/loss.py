"""Output projection and cross-entropy in one, a few rows at a time, so that no full [tokens, V] matrix ever exists.

The gradient is worked out in the forward pass, where the logits of a chunk are at hand anyway; the backward pass only
scales it. Three matrix products in all, as many as without chunking, and a peak of one chunk of logits in fp32 instead
of all of them twice. Source of the idea: Liger-Kernel's fused linear cross-entropy (Hsu et al., 2024).

Where processes share the vocabulary, each computes the logits of its own rows. Of each token they exchange three
numbers, the largest logit, the sum of exponentials and the label's logit; of the gradient, one sum of [tokens, D].

Shape suffixes: N tokens, C tokens of a chunk, D width, V rows of the (padded) vocabulary that this process holds.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
"""Memory for one chunk of fp32 logits: on a CPU near what its caches hold, on a GPU enough for full matrix products."""


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        mask_N: Tensor,
        vocab_size: int,
        group: ProcessGroup | None,
        needs_gradient: bool,
    ) -> Tensor:
        # Sums over chunks are kept in fp32: in bf16 each addition would round.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_gradient else None
        grad_hidden_ND = torch.empty_like(hidden_ND) if needs_gradient else None
        total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        num_rows = weight_VD.size(0)
        first_row = group.rank() * num_rows if group else 0
        num_real = min(max(vocab_size - first_row, 0), num_rows)
        rows = max(1, CHUNK_BYTES[hidden_ND.device.type] // (4 * num_rows))
        for start in range(0, hidden_ND.size(0), rows):
            chunk = slice(start, start + rows)
            hidden_CD, mask_C = hidden_ND[chunk], mask_N[chunk]
            labels_C, here_C = _labels_here(labels_N[chunk], first_row, num_rows, group)
            logits_CV = (hidden_CD @ weight_VD.t()).float()
            logits_CV[:, num_real:] = float("-inf")
            label_logits_C = logits_CV.gather(1, labels_C[:, None]).squeeze(1)
            # In place, and the exponentials once for the loss and its gradient: memory traffic is the cost here.
            largest_C = logits_CV.amax(dim=1)
            if group:
                torch.distributed.all_reduce(largest_C, ReduceOp.MAX, group)
            exponentials_CV = logits_CV.sub_(largest_C[:, None]).exp_()
            sum_C = exponentials_CV.sum(dim=1)
            if here_C is not None:
                sums_2C = torch.stack([sum_C, label_logits_C.where(here_C, 0)])
                torch.distributed.all_reduce(sums_2C, group=group)
                sum_C, label_logits_C = sums_2C
            total += ((largest_C + sum_C.log() - label_logits_C) * mask_C).sum()
            if grad_hidden_ND is None or grad_weight_VD is None:
                continue
            grad_CV = exponentials_CV.mul_((mask_C / sum_C)[:, None])  # softmax
            own_C = mask_C if here_C is None else mask_C * here_C
            grad_CV.scatter_add_(1, labels_C[:, None], -own_C[:, None])
            narrow_CV = grad_CV.to(hidden_ND.dtype)
            grad_hidden_ND[chunk] = narrow_CV @ weight_VD
            if weight_VD.dtype == torch.float32:
                grad_weight_VD.addmm_(narrow_CV.t(), hidden_CD)
            else:
                grad_weight_VD += narrow_CV.t() @ hidden_CD
        if grad_hidden_ND is not None and grad_weight_VD is not None:
            if group:
                torch.distributed.all_reduce(grad_hidden_ND, group=group)
            ctx.save_for_backward(grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        return grad_hidden_ND * grad_total, grad_weight_VD * grad_total, None, None, None, None, None


def _labels_here(
    labels_C: Tensor, first_row: int, num_rows: int, group: ProcessGroup | None
) -> tuple[Tensor, Tensor | None]:
    """The labels counted from this process's first row, and which lie among its rows (None: all do).

    Those that do not are row 0, so that they can be looked up; what comes of it is then left out.
    """
    if group is None:
        return labels_C, None
    own_C = labels_C - first_row
    here_C = (own_C >= 0) & (own_C < num_rows)
    return own_C.where(here_C, 0), here_C


def summed_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    mask_N: Tensor,
    vocab_size: int,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Nats summed over the tokens whose `mask_N` is 1, a scalar in fp32; rows from `vocab_size` on never win.

    With a `group`, whose processes have equal `hidden_ND` and `labels_N`, the weight is this process's rows of the
    vocabulary, in the order of the processes; each gets the loss, and the gradient of `hidden_ND`, of the whole.
    """
    # Asked here: within a Function the gradient is always off, and a parameter requires one in a validation too.
    needs_gradient = torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)
    return _ChunkedCrossEntropy.apply(hidden_ND, weight_VD, labels_N, mask_N, vocab_size, group, needs_gradient)
