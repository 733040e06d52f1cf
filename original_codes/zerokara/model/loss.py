"""Output projection and cross-entropy in one, a few rows at a time, so that no full [tokens, V] matrix ever exists.

The gradient is worked out in the forward pass, where the logits of a chunk are at hand anyway; the backward pass only
scales it. Three matrix products in all, as many as without chunking, and a peak of one chunk of logits in fp32 instead
of all of them twice. Source of the idea: Liger-Kernel's fused linear cross-entropy (Hsu et al., 2024).

Where processes share the vocabulary, each computes the logits of its own rows. Of each token they exchange three
numbers, the largest logit, the sum of exponentials and the label's logit; of the gradient, one sum of [tokens, D].

Shape suffixes: N tokens, C tokens of a chunk, D width, V rows of the (padded) vocabulary that this process holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Memory for one chunk of fp32 logits, enough for full matrix products: on a CPU those of 128 rows, 16 MiB of a
vocabulary of 32,000, ran at two thirds of the speed of those of 512. On a GPU the gradients of each chunk are added to
those of the whole weight in fp32, which takes as long as a product of a thousand rows."""

TILE_ROWS = 64
"""Large chunks are whole multiples of this: a GPU computes products in tiles, of which a part costs as much as all."""

Softmax = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]

fused_softmax: Softmax | None = None
"""`softmax_times_mask` compiled, where `compilation` has put it: one kernel instead of eight passes over the logits."""


def softmax_times_mask(logits_CV: Tensor, mask_C: Tensor, num_real: int) -> tuple[Tensor, Tensor]:
    """The softmax over the real rows times the mask, [C, V] in the dtype of the logits; and log Σ exp in fp32, [C]."""
    real_V = torch.arange(logits_CV.size(1), device=logits_CV.device) < num_real
    wide_CV = logits_CV.float().where(real_V, float("-inf"))
    largest_C = wide_CV.amax(dim=1)
    exponentials_CV = (wide_CV - largest_C[:, None]).exp()
    sum_C = exponentials_CV.sum(dim=1)
    return (exponentials_CV * (mask_C / sum_C)[:, None]).to(logits_CV.dtype), largest_C + sum_C.log()


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
        most_rows = max(1, CHUNK_BYTES[hidden_ND.device.type] // (4 * num_rows))
        num_chunks = max(1, -(-hidden_ND.size(0) // most_rows))
        rows = max(1, -(-hidden_ND.size(0) // num_chunks))  # equal chunks: none is left over that is too small
        if rows > 4 * TILE_ROWS:
            rows = -(-rows // TILE_ROWS) * TILE_ROWS
        fused = fused_softmax if group is None else None
        # One piece of memory for all chunks: on a CPU a fresh one costs as much as what is done in it.
        shared_RV = None if fused else torch.empty(rows, num_rows, dtype=torch.float32, device=hidden_ND.device)
        for start in range(0, hidden_ND.size(0), rows):
            chunk = slice(start, start + rows)
            hidden_CD, mask_C = hidden_ND[chunk], mask_N[chunk]
            labels_C, here_C = _labels_here(labels_N[chunk], first_row, num_rows, group)
            if shared_RV is None:
                assert fused is not None
                narrow_CV = hidden_CD @ weight_VD.t()
                label_logits_C = narrow_CV.gather(1, labels_C[:, None]).squeeze(1).float()
                narrow_CV, log_sum_C = fused(narrow_CV, mask_C, num_real)
                nats_C = log_sum_C - label_logits_C
                total += (nats_C * mask_C).sum()
                # The label's entry is worked out in fp32: its softmax is near 1 where the model is right.
                label_gradient_C = torch.expm1(-nats_C) * mask_C
                narrow_CV.scatter_(1, labels_C[:, None], label_gradient_C[:, None].to(narrow_CV.dtype))
                _add_gradients(narrow_CV, hidden_CD, weight_VD, grad_hidden_ND, grad_weight_VD, chunk)
                continue
            logits_CV = _product(hidden_CD, weight_VD, shared_RV[: hidden_CD.size(0)])
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
            _add_gradients(narrow_CV, hidden_CD, weight_VD, grad_hidden_ND, grad_weight_VD, chunk)
        if grad_hidden_ND is not None and grad_weight_VD is not None:
            if group:
                torch.distributed.all_reduce(grad_hidden_ND, group=group)
            ctx.save_for_backward(grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        # In place: torch raises an error should anybody ask a second time.
        return grad_hidden_ND.mul_(grad_total), grad_weight_VD.mul_(grad_total), None, None, None, None, None


def _product(hidden_CD: Tensor, weight_VD: Tensor, out_CV: Tensor) -> Tensor:
    """The logits of a chunk in fp32, in the memory of `out_CV`."""
    if hidden_CD.dtype == torch.float32:
        return torch.mm(hidden_CD, weight_VD.t(), out=out_CV)
    return out_CV.copy_(hidden_CD @ weight_VD.t())


def _add_gradients(
    grad_CV: Tensor,
    hidden_CD: Tensor,
    weight_VD: Tensor,
    grad_hidden_ND: Tensor | None,
    grad_weight_VD: Tensor | None,
    chunk: slice,
) -> None:
    """Take a chunk's gradient of the logits to those of the hidden states and of the weight, where they are wanted."""
    if grad_hidden_ND is None or grad_weight_VD is None:
        return
    torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[chunk])
    if weight_VD.dtype == torch.float32:
        grad_weight_VD.addmm_(grad_CV.t(), hidden_CD)
    else:
        grad_weight_VD += grad_CV.t() @ hidden_CD


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
