"""Output projection and cross-entropy in one, a few rows at a time, so that no full [tokens, V] matrix ever exists.

The gradient is worked out in the forward pass, where the logits of a chunk are at hand anyway; the backward pass only
scales it. Three matrix products in all, as many as without chunking, and a peak of one chunk of logits in fp32 instead
of all of them twice. Source of the idea: Liger-Kernel's fused linear cross-entropy (Hsu et al., 2024).

Shape suffixes: N tokens, C tokens of a chunk, D width, V rows of the (padded) vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
"""Memory for one chunk of fp32 logits: on a CPU near what its caches hold, on a GPU enough for full matrix products."""


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, mask_N: Tensor, vocab_size: int
    ) -> Tensor:
        needs_gradient = hidden_ND.requires_grad or weight_VD.requires_grad
        # Sums over chunks are kept in fp32: in bf16 each addition would round.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_gradient else None
        grad_hidden_ND = torch.empty_like(hidden_ND) if needs_gradient else None
        total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        rows = max(1, CHUNK_BYTES[hidden_ND.device.type] // (4 * weight_VD.size(0)))
        for start in range(0, hidden_ND.size(0), rows):
            chunk = slice(start, start + rows)
            hidden_CD, labels_C, mask_C = hidden_ND[chunk], labels_N[chunk], mask_N[chunk]
            logits_CV = (hidden_CD @ weight_VD.t()).float()
            logits_CV[:, vocab_size:] = float("-inf")
            label_logits_C = logits_CV.gather(1, labels_C[:, None]).squeeze(1)
            # In place, and the exponentials once for the loss and its gradient: memory traffic is the cost here.
            largest_C = logits_CV.amax(dim=1)
            exponentials_CV = logits_CV.sub_(largest_C[:, None]).exp_()
            sum_C = exponentials_CV.sum(dim=1)
            total += ((largest_C + sum_C.log() - label_logits_C) * mask_C).sum()
            if grad_hidden_ND is None or grad_weight_VD is None:
                continue
            grad_CV = exponentials_CV.mul_((mask_C / sum_C)[:, None])  # softmax
            grad_CV.scatter_add_(1, labels_C[:, None], -mask_C[:, None])
            narrow_CV = grad_CV.to(hidden_ND.dtype)
            grad_hidden_ND[chunk] = narrow_CV @ weight_VD
            if weight_VD.dtype == torch.float32:
                grad_weight_VD.addmm_(narrow_CV.t(), hidden_CD)
            else:
                grad_weight_VD += narrow_CV.t() @ hidden_CD
        if grad_hidden_ND is not None and grad_weight_VD is not None:
            ctx.save_for_backward(grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        return grad_hidden_ND * grad_total, grad_weight_VD * grad_total, None, None, None


def summed_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, mask_N: Tensor, vocab_size: int
) -> Tensor:
    """Nats summed over the tokens whose `mask_N` is 1, a scalar in fp32; rows from `vocab_size` on never win."""
    return _ChunkedCrossEntropy.apply(hidden_ND, weight_VD, labels_N, mask_N, vocab_size)
