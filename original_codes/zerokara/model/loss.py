"""Output projection and cross-entropy in one, chunk by chunk, so that no full [tokens, vocabulary] matrix ever exists.

The gradient is computed in the forward pass, where the logits of a chunk are at hand anyway; the backward pass only
scales it. That takes three matrix products in all, as many as without chunking, and a peak of one chunk of fp32 logits
instead of all logits twice. Idea: Liger-Kernel's fused linear cross-entropy (Hsu et al., 2024, arXiv 2410.10989).

A chunk is computed in one of three ways, each a function below. It returns the nats of each token [C] in fp32, and the
gradient of the masked sum with respect to the logits [C, V] in the dtype of the hidden states, where it is needed:

- `_eager`: in place in one fp32 buffer that all chunks share;
- `_fused`: with the softmax as one compiled kernel (`compilation`), on a GPU;
- `_vocabulary_parallel`: each tensor-parallel rank holds some rows of the vocabulary. Of each token the ranks exchange
  three numbers (the largest logit, the sum of exponentials, the label's logit), as Megatron-LM does (Shoeybi et al.,
  2019, section 3; megatron/core/tensor_parallel/cross_entropy.py); of the gradient, one sum of [tokens, D].

Shape suffixes: N tokens, C tokens of a chunk, D hidden size, V rows of the (padded) vocabulary that this rank holds.
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
vocabulary of 32,000, ran at two thirds of the speed of those of 512. On a GPU the gradient of each chunk is added to
that of the whole weight in fp32, which takes as long as a product of a thousand rows."""

TILE_ROWS = 64
"""Large chunks are whole multiples of this: a GPU computes products in tiles, and a partial tile costs a whole one."""

Softmax = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
fused_softmax: Softmax | None = None
"""`softmax_times_mask` compiled, set by `compilation`: one kernel instead of eight passes over the logits."""


def summed_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    mask_N: Tensor,
    vocab_size: int,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Nats summed over the tokens whose `mask_N` is 1, a scalar in fp32; rows from `vocab_size` on never win.

    With a tensor-parallel `group`, whose ranks have equal `hidden_ND` and `labels_N`, the weight is this rank's rows of
    the vocabulary, in the order of the ranks; each rank gets the loss, and the gradient of `hidden_ND`, of the whole.
    """
    # Asked here: inside a Function gradients are always off, and a parameter requires one during validation too.
    needs_gradient = torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)
    return _ChunkedCrossEntropy.apply(hidden_ND, weight_VD, labels_N, mask_N, vocab_size, group, needs_gradient)


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
        rows = _rows_per_chunk(hidden_ND, weight_VD)
        softmax = fused_softmax if group is None else None
        # One buffer for all chunks: on a CPU fresh memory costs as much as what is computed in it.
        size = (0 if softmax else rows, weight_VD.size(0))
        buffer_CV = torch.empty(size, dtype=torch.float32, device=hidden_ND.device)
        gradients = _Gradients(hidden_ND, weight_VD) if needs_gradient else None
        total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        grad_CV: Tensor | None
        for start in range(0, hidden_ND.size(0), rows):
            chunk = slice(start, start + rows)
            inputs = hidden_ND[chunk], weight_VD, labels_N[chunk], mask_N[chunk], vocab_size
            if group:
                nats_C, grad_CV = _vocabulary_parallel(*inputs, buffer_CV, needs_gradient, group)
            elif softmax:
                nats_C, grad_CV = _fused(*inputs, softmax)
            else:
                nats_C, grad_CV = _eager(*inputs, buffer_CV, needs_gradient)
            total += (nats_C * mask_N[chunk]).sum()
            if gradients and grad_CV is not None:
                gradients.add(chunk, grad_CV, hidden_ND, weight_VD)
            del grad_CV  # freed before the next chunk's logits are made
        if gradients:
            if group:
                torch.distributed.all_reduce(gradients.hidden_ND, group=group)
            ctx.save_for_backward(gradients.hidden_ND, gradients.weight_VD.to(weight_VD.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        # In place: torch raises an error should anybody ask a second time.
        return grad_hidden_ND.mul_(grad_total), grad_weight_VD.mul_(grad_total), None, None, None, None, None


class _Gradients:
    """The gradients of hidden states and weight, filled chunk by chunk."""

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor):
        self.hidden_ND = torch.empty_like(hidden_ND)
        # The sum over chunks is kept in fp32: in bf16 each addition would round.
        self.weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)

    def add(self, chunk: slice, grad_CV: Tensor, hidden_ND: Tensor, weight_VD: Tensor) -> None:
        """Propagate a chunk's gradient of the logits to the hidden states and the weight."""
        torch.mm(grad_CV, weight_VD, out=self.hidden_ND[chunk])
        if weight_VD.dtype == torch.float32:
            self.weight_VD.addmm_(grad_CV.t(), hidden_ND[chunk])
        else:
            self.weight_VD += grad_CV.t() @ hidden_ND[chunk]


def _rows_per_chunk(hidden_ND: Tensor, weight_VD: Tensor) -> int:
    num_tokens = hidden_ND.size(0)
    most_rows = max(1, CHUNK_BYTES[hidden_ND.device.type] // (4 * weight_VD.size(0)))
    num_chunks = max(1, -(-num_tokens // most_rows))
    rows = max(1, -(-num_tokens // num_chunks))  # equal chunks: no small one is left over
    return -(-rows // TILE_ROWS) * TILE_ROWS if rows > 4 * TILE_ROWS else rows


def _eager(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    labels_C: Tensor,
    mask_C: Tensor,
    vocab_size: int,
    buffer_CV: Tensor,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """In place in `buffer_CV`, which has C rows or more."""
    logits_CV = _logits(hidden_CD, weight_VD, buffer_CV)
    logits_CV[:, vocab_size:] = float("-inf")
    label_logits_C = logits_CV.gather(1, labels_C[:, None]).squeeze(1)
    # In place, and the exponentials once for the loss and its gradient: memory traffic is the cost here.
    max_C = logits_CV.amax(dim=1)
    exp_CV = logits_CV.sub_(max_C[:, None]).exp_()
    sum_C = exp_CV.sum(dim=1)
    nats_C = max_C + sum_C.log() - label_logits_C
    if not needs_gradient:
        return nats_C, None
    grad_CV = exp_CV.mul_((mask_C / sum_C)[:, None])  # mask · softmax
    grad_CV.scatter_add_(1, labels_C[:, None], -mask_C[:, None])
    return nats_C, grad_CV.to(hidden_CD.dtype)


def _fused(
    hidden_CD: Tensor, weight_VD: Tensor, labels_C: Tensor, mask_C: Tensor, vocab_size: int, softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """With `softmax` as one kernel; the logits stay in the dtype of the hidden states."""
    logits_CV = hidden_CD @ weight_VD.t()
    label_logits_C = logits_CV.gather(1, labels_C[:, None]).squeeze(1).float()
    grad_CV, log_sum_C = softmax(logits_CV, mask_C, vocab_size)
    nats_C = log_sum_C - label_logits_C
    # The label's entry, softmax − 1, is computed in fp32: its softmax is near 1 where the model is right.
    label_gradient_C = torch.expm1(-nats_C) * mask_C
    grad_CV.scatter_(1, labels_C[:, None], label_gradient_C[:, None].to(grad_CV.dtype))
    return nats_C, grad_CV


def _vocabulary_parallel(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    labels_C: Tensor,
    mask_C: Tensor,
    vocab_size: int,
    buffer_CV: Tensor,
    needs_gradient: bool,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor | None]:
    """As `_eager`, where this rank holds the V rows of the vocabulary from V · `group.rank()` on."""
    num_rows = weight_VD.size(0)
    first_row = group.rank() * num_rows
    num_real = min(max(vocab_size - first_row, 0), num_rows)
    # A label of another rank is looked up as row 0; the result is masked out.
    labels_C = labels_C - first_row
    is_local_C = (labels_C >= 0) & (labels_C < num_rows)
    labels_C = labels_C.where(is_local_C, 0)
    logits_CV = _logits(hidden_CD, weight_VD, buffer_CV)
    logits_CV[:, num_real:] = float("-inf")
    label_logits_C = logits_CV.gather(1, labels_C[:, None]).squeeze(1)
    max_C = logits_CV.amax(dim=1)
    torch.distributed.all_reduce(max_C, ReduceOp.MAX, group)
    exp_CV = logits_CV.sub_(max_C[:, None]).exp_()
    sums_2C = torch.stack([exp_CV.sum(dim=1), label_logits_C.where(is_local_C, 0)])
    torch.distributed.all_reduce(sums_2C, group=group)
    sum_C, label_logits_C = sums_2C
    nats_C = max_C + sum_C.log() - label_logits_C
    if not needs_gradient:
        return nats_C, None
    grad_CV = exp_CV.mul_((mask_C / sum_C)[:, None])
    grad_CV.scatter_add_(1, labels_C[:, None], -(mask_C * is_local_C)[:, None])
    return nats_C, grad_CV.to(hidden_CD.dtype)


def _logits(hidden_CD: Tensor, weight_VD: Tensor, buffer_CV: Tensor) -> Tensor:
    """The logits of a chunk in fp32, [C, V], in the memory of `buffer_CV` (which has C rows or more)."""
    out_CV = buffer_CV[: hidden_CD.size(0)]
    if hidden_CD.dtype == torch.float32:
        return torch.mm(hidden_CD, weight_VD.t(), out=out_CV)
    return out_CV.copy_(hidden_CD @ weight_VD.t())


def softmax_times_mask(logits_CV: Tensor, mask_C: Tensor, num_real: int) -> tuple[Tensor, Tensor]:
    """The softmax over the real rows times the mask, [C, V] in the dtype of the logits; and log Σ exp in fp32, [C]."""
    real_V = torch.arange(logits_CV.size(1), device=logits_CV.device) < num_real
    wide_CV = logits_CV.float().where(real_V, float("-inf"))
    max_C = wide_CV.amax(dim=1)
    exp_CV = (wide_CV - max_C[:, None]).exp()
    sum_C = exp_CV.sum(dim=1)
    return (exp_CV * (mask_C / sum_C)[:, None]).to(logits_CV.dtype), max_C + sum_C.log()
