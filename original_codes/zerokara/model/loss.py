"""Output projection and cross-entropy in one, chunk by chunk, so that no full [tokens, vocabulary] matrix ever exists.

The gradient is computed in the forward pass, where the logits of a chunk are at hand anyway; the backward pass only
scales it. That takes three matrix products in all, as many as without chunking, and a peak of one chunk of fp32 logits
instead of all logits twice. Idea: Liger-Kernel's fused linear cross-entropy (Hsu et al., 2024, arXiv 2410.10989).

A tensor-parallel rank may hold only some rows of the vocabulary. Of each token the ranks then exchange three numbers
(the largest logit or log Σ exp, the sum of exponentials, the label's logit), as Megatron-LM does (Shoeybi et al., 2019,
section 3; megatron/core/tensor_parallel/cross_entropy.py); of the gradient, one sum of [tokens, D].

Why not torch.nn.functional.linear_cross_entropy (2.13): docs/decisions.md has the measurement.

Shape suffixes: N tokens, C tokens of a chunk, W of a block, D hidden size, V rows of the (padded) vocabulary that this
rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from zerokara.model.loss_chunks import block_rows, chunk_rows

fused_softmax: Sequence[Callable[..., Tensor]] | None = None
"""`SOFTMAX` compiled, set by `compilation`: two kernels instead of eight passes over the logits."""
is_warming_up = False
"""True while `compilation` shows it the sizes of training, though no other gradient is computed."""


def cross_entropy(
    hidden_SBD: Tensor,
    labels_BS: Tensor,
    mask_BS: Tensor | None,
    per_token: bool,
    weight_VD: Tensor,
    vocab_size: int,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Nats summed over the tokens whose `mask_BS` is 1 (None: all), a scalar in fp32; rows from `vocab_size` never win.

    `per_token` gives those of each token, [B, S] in fp32, whatever its mask, without gradients, in the same chunks.

    With a tensor-parallel `group`, whose ranks have equal `hidden_SBD` and `labels_BS`, the weight is this rank's rows
    of the vocabulary, in the order of the ranks; each rank gets the loss, and the gradient of `hidden_SBD`, of the
    whole.
    """
    hidden_ND, labels_N = hidden_SBD.transpose(0, 1).flatten(0, 1), labels_BS.flatten()
    counted_BS = torch.ones_like(labels_BS, dtype=torch.float32) if per_token or mask_BS is None else mask_BS
    arguments = hidden_ND, weight_VD, labels_N, counted_BS.flatten(), vocab_size, group
    if per_token:
        with torch.no_grad():
            return torch.cat([nats_C for _, nats_C, _ in _chunks(*arguments, needs_gradient=False)]).view_as(labels_BS)
    # Asked here: inside a Function gradients are always off, and a parameter requires one during validation too.
    differentiates = torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)
    return _ChunkedCrossEntropy.apply(*arguments, differentiates or is_warming_up)


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
        total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        grad_hidden_ND = torch.empty_like(hidden_ND if needs_gradient else hidden_ND[:0])
        # The sum over chunks is kept in fp32: in bf16 each addition would round.
        grad_weight_VD = torch.zeros_like(weight_VD if needs_gradient else weight_VD[:0], dtype=torch.float32)
        chunks = _chunks(hidden_ND, weight_VD, labels_N, mask_N, vocab_size, group, needs_gradient)
        for chunk, nats_C, grad_CV in chunks:
            total += (nats_C * mask_N[chunk]).sum()
            if needs_gradient and grad_CV is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[chunk])
                _add_product(grad_weight_VD, grad_CV.t(), hidden_ND[chunk])
            del grad_CV  # freed before the next chunk's logits are made
        if needs_gradient:
            if group:
                torch.distributed.all_reduce(grad_hidden_ND, group=group)
            ctx.save_for_backward(grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype))
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
    """Yield each chunk, its nats [C] and the gradient of its logits [C, V], to which this keeps no reference."""
    num_tokens = hidden_ND.size(0)
    rows = chunk_rows(hidden_ND.device.type, num_tokens, weight_VD.size(0))
    # One buffer for all chunks: on a CPU fresh memory costs as much as what is computed in it.
    size = rows, weight_VD.size(0)
    if hidden_ND.dtype != torch.float32:
        size = block_rows(hidden_ND.device.type, *size), weight_VD.size(0)
    buffer_CV = None if fused_softmax else torch.empty(size, dtype=torch.float32, device=hidden_ND.device)
    for start in range(0, num_tokens, rows):
        chunk = slice(start, start + rows)
        inputs = hidden_ND[chunk], weight_VD, labels_N[chunk], mask_N[chunk], vocab_size, group
        yield chunk, *_nats_and_gradient(*inputs, buffer_CV, needs_gradient)


def _nats_and_gradient(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    labels_C: Tensor,
    mask_C: Tensor,
    vocab_size: int,
    group: ProcessGroup | None,
    buffer_CV: Tensor | None,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the nats of a chunk's tokens, [C] in fp32, and the gradient of their masked sum with respect to logits.

    The gradient is [C, V] in the dtype of the hidden states. In place, in blocks of `block_rows`: in fp32 within
    `buffer_CV` (C rows or more), otherwise through it (fp32, a block). Or without a buffer by the compiled softmax.
    """
    num_rows = weight_VD.size(0)
    first_row = group.rank() * num_rows if group else 0
    num_real = min(max(vocab_size - first_row, 0), num_rows)  # rows of this rank that are no padding
    rows_C = labels_C - first_row
    is_local_C = (rows_C >= 0) & (rows_C < num_rows)
    labels_C = rows_C.where(is_local_C, 0)
    in_fp32 = hidden_CD.dtype == torch.float32
    if buffer_CV is not None and in_fp32:
        logits_CV = torch.mm(hidden_CD, weight_VD.t(), out=buffer_CV[: len(hidden_CD)])
    else:
        logits_CV = hidden_CD @ weight_VD.t()
    label_logits_C = logits_CV.gather(1, labels_C[:, None]).squeeze(1).float()
    if buffer_CV is not None:
        logits_CV[:, num_real:] = float("-inf")
        nats_C = torch.empty_like(label_logits_C)
        # The exponentials once for the loss and its gradient, while a block lies in the cache: memory traffic is the
        # cost here. A row's numbers are those of the row by itself.
        width = block_rows(hidden_CD.device.type, *logits_CV.shape)
        for start in range(0, len(hidden_CD), width):
            block = slice(start, start + width)
            exp_WV = logits_CV[block]
            if not in_fp32:
                exp_WV = buffer_CV[: len(exp_WV)].copy_(exp_WV)
            max_W = _over_ranks(exp_WV.amax(dim=1), ReduceOp.MAX, group)
            exp_WV.sub_(max_W[:, None]).exp_()
            sums_2W = torch.stack([exp_WV.sum(dim=1), label_logits_C[block].where(is_local_C[block], 0)])
            sum_W, label_logits_W = _over_ranks(sums_2W, ReduceOp.SUM, group)
            nats_C[block] = max_W + sum_W.log() - label_logits_W
            if needs_gradient:
                exp_WV.mul_((mask_C[block] / sum_W)[:, None])  # mask · softmax
                exp_WV.scatter_add_(1, labels_C[block, None], -(mask_C * is_local_C)[block, None])
                if not in_fp32:
                    logits_CV[block] = exp_WV
        return nats_C, logits_CV if needs_gradient else None
    assert fused_softmax is not None
    log_sums, softmax_times_mask = fused_softmax
    log_sum_C = log_sums(logits_CV, num_real) if num_real else torch.full_like(label_logits_C, float("-inf"))
    if group:
        max_C = _over_ranks(log_sum_C.clone(), ReduceOp.MAX, group)
        sums_2C = torch.stack([(log_sum_C - max_C).exp(), label_logits_C.where(is_local_C, 0)])
        sum_C, label_logits_C = _over_ranks(sums_2C, ReduceOp.SUM, group)
        log_sum_C = max_C + sum_C.log()
    nats_C = log_sum_C - label_logits_C
    if not needs_gradient:
        return nats_C, None
    grad_CV = softmax_times_mask(logits_CV, log_sum_C, mask_C, num_real)
    # The label's entry, softmax − 1, is computed in fp32: its softmax is near 1 where the model is right. Of a label on
    # another rank the entry of row 0 stays as it is.
    label_gradient_C = (torch.expm1(-nats_C) * mask_C).to(grad_CV.dtype)
    entries_C = label_gradient_C.where(is_local_C, grad_CV.gather(1, labels_C[:, None]).squeeze(1))
    return nats_C, grad_CV.scatter_(1, labels_C[:, None], entries_C[:, None])


def _add_product(sum_VD: Tensor, grad_VC: Tensor, hidden_CD: Tensor) -> None:
    """Add a product to a sum in fp32."""
    if grad_VC.dtype == torch.float32:
        sum_VD.addmm_(grad_VC, hidden_CD)
    elif adds_in_fp32(grad_VC.device, grad_VC.dtype):
        torch.addmm(sum_VD, grad_VC, hidden_CD, out_dtype=torch.float32, out=sum_VD)
    else:
        sum_VD += grad_VC @ hidden_CD


@cache
def adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True where a product of numbers in `dtype` is added in fp32 without a matrix in between, by a trial.

    `addmm` has `out_dtype` on CUDA alone; some versions want the sum in `dtype` as well (aten/native/cuda/Blas.cpp).
    """
    if device.type != "cuda":
        return False
    factor, total = (torch.ones(16, 16, dtype=each, device=device) for each in (dtype, torch.float32))
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except (TypeError, RuntimeError):
        return False
    return True


def _over_ranks(numbers: Tensor, operation: ReduceOp.RedOpType, group: ProcessGroup | None) -> Tensor:
    """Reduce in place over a tensor-parallel group, if there is one."""
    if group:
        torch.distributed.all_reduce(numbers, operation, group)
    return numbers


def log_sum_of_exponentials(logits_CV: Tensor, num_real: int) -> Tensor:
    """log Σ exp over the real rows, [C] in fp32; there must be one."""
    real_CV = _real(logits_CV, num_real)
    max_C1 = real_CV.amax(dim=1, keepdim=True)
    return (max_C1 + (real_CV - max_C1).exp().sum(dim=1, keepdim=True).log()).squeeze(1)


def softmax_times_mask(logits_CV: Tensor, log_sum_C: Tensor, mask_C: Tensor, num_real: int) -> Tensor:
    """exp(logit − log Σ exp) · mask, [C, V] in the dtype of the logits; 0 in the rows that are not real."""
    return ((_real(logits_CV, num_real) - log_sum_C[:, None]).exp() * mask_C[:, None]).to(logits_CV.dtype)


def _real(logits_CV: Tensor, num_real: int) -> Tensor:
    """The logits in fp32, -inf in the rows from `num_real` on."""
    real_V = torch.arange(logits_CV.size(1), device=logits_CV.device) < num_real
    return logits_CV.float().where(real_V, float("-inf"))


SOFTMAX = log_sum_of_exponentials, softmax_times_mask
"""The softmax in two parts: ranks that share the vocabulary communicate between them; evaluation needs the first."""
