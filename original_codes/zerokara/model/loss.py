"""Output projection and cross-entropy in one, chunk by chunk, so that no full [tokens, vocabulary] matrix ever exists.

The gradient is computed in the forward pass, where the logits of a chunk are at hand anyway; the backward pass only
scales it. That takes three matrix products in all, as many as without chunking, and a peak of one chunk of fp32 logits
instead of all logits twice. Idea: Liger-Kernel's fused linear cross-entropy (Hsu et al., 2024, arXiv 2410.10989).

A chunk is computed in one of four ways, each a function below. It returns the nats of each token [C] in fp32, and the
gradient of the masked sum with respect to the logits [C, V] in the dtype of the hidden states, where it is needed:

- `_eager`: in place in one fp32 buffer that all chunks share;
- `_fused`: with the softmax as one compiled kernel (`compilation`), on a GPU;
- `_vocabulary_parallel`: each tensor-parallel rank holds some rows of the vocabulary. Of each token the ranks exchange
  three numbers (the largest logit, the sum of exponentials, the label's logit), as Megatron-LM does (Shoeybi et al.,
  2019, section 3; megatron/core/tensor_parallel/cross_entropy.py); of the gradient, one sum of [tokens, D];
- `_fused_vocabulary_parallel`: the same, with what lies between these exchanges as one compiled kernel each.

Shape suffixes: N tokens, C tokens of a chunk, D hidden size, V rows of the (padded) vocabulary that this rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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


class ParallelSoftmax(NamedTuple):
    """The softmax over a vocabulary that the ranks share, in three parts, with an all-reduce after the first two."""

    largest: Callable[[Tensor, int], Tensor]
    """`largest_logits`."""
    sums: Callable[[Tensor, Tensor, int], Tensor]
    """`sums_of_exponentials`."""
    times_mask: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
    """`exponentials_times_mask`."""


fused_parallel_softmax: ParallelSoftmax | None = None
"""`PARALLEL_SOFTMAX` compiled, set by `compilation`."""


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


def token_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, vocab_size: int, group: ProcessGroup | None = None
) -> Tensor:
    """Nats of each token, [N] in fp32, without gradients: what `summed_cross_entropy` adds up, in the same chunks."""
    with torch.no_grad():
        mask_N = torch.ones_like(labels_N, dtype=torch.float32)
        chunks = _chunks(hidden_ND, weight_VD, labels_N, mask_N, vocab_size, group, needs_gradient=False)
        return torch.cat([nats_C for _, nats_C, _ in chunks])


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
        gradients = _Gradients(hidden_ND, weight_VD) if needs_gradient else None
        total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        chunks = _chunks(hidden_ND, weight_VD, labels_N, mask_N, vocab_size, group, needs_gradient)
        for chunk, nats_C, grad_CV in chunks:
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


def _chunks(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    mask_N: Tensor,
    vocab_size: int,
    group: ProcessGroup | None,
    needs_gradient: bool,
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Each chunk, its nats [C] and the gradient of its logits [C, V], to which this keeps no reference."""
    rows = _rows_per_chunk(hidden_ND, weight_VD)
    is_fused = (fused_softmax if group is None else fused_parallel_softmax) is not None
    # One buffer for all chunks: on a CPU fresh memory costs as much as what is computed in it.
    size = (0 if is_fused else rows, weight_VD.size(0))
    buffer_CV = torch.empty(size, dtype=torch.float32, device=hidden_ND.device)
    for start in range(0, hidden_ND.size(0), rows):
        chunk = slice(start, start + rows)
        inputs = hidden_ND[chunk], weight_VD, labels_N[chunk], mask_N[chunk], vocab_size
        if group and fused_parallel_softmax:
            yield chunk, *_fused_vocabulary_parallel(*inputs, fused_parallel_softmax, group)
        elif group:
            yield chunk, *_vocabulary_parallel(*inputs, buffer_CV, needs_gradient, group)
        elif fused_softmax:
            yield chunk, *_fused(*inputs, fused_softmax)
        else:
            yield chunk, *_eager(*inputs, buffer_CV, needs_gradient)


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
    num_real, is_local_C, labels_C = _of_this_rank(labels_C, weight_VD.size(0), vocab_size, group)
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


def _fused_vocabulary_parallel(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    labels_C: Tensor,
    mask_C: Tensor,
    vocab_size: int,
    softmax: ParallelSoftmax,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """As `_vocabulary_parallel`, in the kernels of `softmax`; the logits stay in the dtype of the hidden states."""
    num_real, is_local_C, labels_C = _of_this_rank(labels_C, weight_VD.size(0), vocab_size, group)
    logits_CV = hidden_CD @ weight_VD.t()
    label_logits_C = logits_CV.gather(1, labels_C[:, None]).squeeze(1).float()
    max_C = softmax.largest(logits_CV, num_real)
    torch.distributed.all_reduce(max_C, ReduceOp.MAX, group)
    sums_2C = torch.stack([softmax.sums(logits_CV, max_C, num_real), label_logits_C.where(is_local_C, 0)])
    torch.distributed.all_reduce(sums_2C, group=group)
    sum_C, label_logits_C = sums_2C
    nats_C = max_C + sum_C.log() - label_logits_C
    grad_CV = softmax.times_mask(logits_CV, max_C, sum_C, mask_C, num_real)
    # As in `_fused`; of a label on another rank the entry of row 0 stays as it is.
    label_gradient_C = (torch.expm1(-nats_C) * mask_C).to(grad_CV.dtype)
    entries_C = label_gradient_C.where(is_local_C, grad_CV.gather(1, labels_C[:, None]).squeeze(1))
    return nats_C, grad_CV.scatter_(1, labels_C[:, None], entries_C[:, None])


def _of_this_rank(labels_C: Tensor, num_rows: int, vocab_size: int, group: ProcessGroup) -> tuple[int, Tensor, Tensor]:
    """How many of this rank's rows are real; of each label whether it is one of them, and its row, else 0."""
    first_row = group.rank() * num_rows
    rows_C = labels_C - first_row
    is_local_C = (rows_C >= 0) & (rows_C < num_rows)
    return min(max(vocab_size - first_row, 0), num_rows), is_local_C, rows_C.where(is_local_C, 0)


def _logits(hidden_CD: Tensor, weight_VD: Tensor, buffer_CV: Tensor) -> Tensor:
    """The logits of a chunk in fp32, [C, V], in the memory of `buffer_CV` (which has C rows or more)."""
    out_CV = buffer_CV[: hidden_CD.size(0)]
    if hidden_CD.dtype == torch.float32:
        return torch.mm(hidden_CD, weight_VD.t(), out=out_CV)
    return out_CV.copy_(hidden_CD @ weight_VD.t())


def softmax_times_mask(logits_CV: Tensor, mask_C: Tensor, num_real: int) -> tuple[Tensor, Tensor]:
    """The softmax over the real rows times the mask, [C, V] in the dtype of the logits; and log Σ exp in fp32, [C]."""
    max_C = largest_logits(logits_CV, num_real)
    sum_C = sums_of_exponentials(logits_CV, max_C, num_real)
    return exponentials_times_mask(logits_CV, max_C, sum_C, mask_C, num_real), max_C + sum_C.log()


def largest_logits(logits_CV: Tensor, num_real: int) -> Tensor:
    """The largest logit of the real rows, [C] in fp32; -inf where no row is real."""
    return _real(logits_CV, num_real).amax(dim=1)


def sums_of_exponentials(logits_CV: Tensor, max_C: Tensor, num_real: int) -> Tensor:
    """Σ exp(logit − max) over the real rows, [C] in fp32."""
    return (_real(logits_CV, num_real) - max_C[:, None]).exp().sum(dim=1)


def exponentials_times_mask(logits_CV: Tensor, max_C: Tensor, sum_C: Tensor, mask_C: Tensor, num_real: int) -> Tensor:
    """exp(logit − max) · mask / sum, [C, V] in the dtype of the logits; 0 in the rows that are not real."""
    exp_CV = (_real(logits_CV, num_real) - max_C[:, None]).exp()
    return (exp_CV * (mask_C / sum_C)[:, None]).to(logits_CV.dtype)


def _real(logits_CV: Tensor, num_real: int) -> Tensor:
    """The logits in fp32, -inf in the rows from `num_real` on."""
    real_V = torch.arange(logits_CV.size(1), device=logits_CV.device) < num_real
    return logits_CV.float().where(real_V, float("-inf"))


PARALLEL_SOFTMAX = ParallelSoftmax(largest_logits, sums_of_exponentials, exponentials_times_mask)
