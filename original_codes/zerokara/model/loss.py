"""Output projection and cross-entropy in one, chunk by chunk, so that no full [tokens, vocabulary] matrix ever exists.

The gradient is computed in the forward pass, where the logits of a chunk are at hand anyway; the backward pass only
scales it. That takes three matrix products in all, as many as without chunking, and a peak of one chunk of fp32 logits
instead of all logits twice. Idea: Liger-Kernel's fused linear cross-entropy (Hsu et al., 2024, arXiv 2410.10989).

A tensor-parallel rank may hold only some rows of the vocabulary. Of each token the ranks then exchange three numbers
(the largest logit or log Σ exp, the sum of exponentials, the label's logit), as Megatron-LM does (Shoeybi et al., 2019,
section 3; megatron/core/tensor_parallel/cross_entropy.py); of the gradient, one sum of [tokens, D].

With teachers (Hinton et al., 2015, arXiv 1503.02531) the loss is (1 - w)·cross-entropy + w·KL(p‖q): w `teacher_weight`,
p the mean of their probabilities, made chunk by chunk like the student's own, q. They are decoders of any size with the
same vocabulary, and compute their hidden states one after another.

Why not torch.nn.functional.linear_cross_entropy (2.13): docs/decisions.md has the measurement.

Shape suffixes: N tokens, C tokens of a chunk, W of a block, D hidden size, V rows of the (padded) vocabulary that this
rank holds.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.nn.functional import linear

from zerokara.model.layers import Kernels, Softmax
from zerokara.model.shapes import block_rows, chunk_rows
from zerokara.model.weight_gradients import add_product


class Projection(NamedTuple):
    """The output projection, as this process holds it."""

    weight_VD: Tensor
    vocab_size: int
    """Rows of the whole vocabulary that are no padding."""
    group: ProcessGroup | None = None
    """The tensor-parallel ranks that share the vocabulary: each has as many rows, in the order of the ranks."""


class Lesson(NamedTuple):
    """What teachers say about the tokens of a micro batch."""

    weight: float
    outputs: list[tuple[Tensor, Tensor]]
    """Of each teacher the last hidden states, [N, D], and the output matrix, [V, D]."""

    def probabilities(self, chunk: slice) -> Tensor:
        """Return the mean of the teachers' probabilities, [C, V] in fp32."""
        logits = (linear(hidden_ND[chunk], weight_VD).float() for hidden_ND, weight_VD in self.outputs)
        return reduce(Tensor.add_, (each_CV.softmax(dim=1) for each_CV in logits)).div_(len(self.outputs))


class Teachers:
    """The teachers of one model: no part of it, so that no engine trains, shards or saves them."""

    def __init__(self, models: Sequence[Any], weight: float):
        """`models` are `Decoder`s, whose module knows this one."""
        self._models, self._weight = models, weight

    @torch.no_grad()
    def lesson(self, *batch: Any) -> Lesson:
        """Let them read a batch, the arguments of `Decoder.hidden_states`."""
        outputs = []
        for model in self._models:
            projection = model.projection()
            hidden_ND = model.hidden_states(*batch).transpose(0, 1).flatten(0, 1)
            outputs.append((hidden_ND, projection.weight_VD[: projection.vocab_size]))
        return Lesson(self._weight, outputs)


def cross_entropy(
    hidden_SBD: Tensor,
    labels_BS: Tensor,
    mask_BS: Tensor | None,
    per_token: bool,
    projection: Projection,
    kernels: Kernels,
    lesson: Lesson | None = None,
) -> Tensor:
    """Nats summed over the tokens whose mask is 1 (None: over all), a scalar in fp32; padding rows never win. A lesson
    adds its KL divergence; the process must then hold the whole vocabulary.

    `per_token` gives those of each token, [B, S] in fp32, whatever its mask, without gradients, in the same chunks.

    Ranks that share a projection have equal `hidden_SBD` and labels; each gets the loss, and the gradient of
    `hidden_SBD`, of the whole.
    """
    hidden_ND, labels_N = hidden_SBD.transpose(0, 1).flatten(0, 1), labels_BS.flatten()
    arguments = hidden_ND, labels_N, lesson, projection, kernels.softmax
    if per_token:
        with torch.no_grad():
            return torch.cat([nats_C for _, nats_C, _ in _chunks(*arguments, needs_gradient=False)]).view_as(labels_BS)
    # Asked here: inside a Function gradients are always off, and a parameter requires one during validation too.
    needs_gradient = torch.is_grad_enabled() and (hidden_ND.requires_grad or projection.weight_VD.requires_grad)
    mask_N = None if mask_BS is None else mask_BS.flatten()
    return _ChunkedCrossEntropy.apply(hidden_ND, projection.weight_VD, *arguments[1:], mask_N, needs_gradient)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Torch differentiates by arguments alone, not by what is inside of them: hence so many."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        lesson: Lesson | None,
        projection: Projection,
        softmax: Softmax | None,
        mask_N: Tensor | None,
        needs_gradient: bool,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        grad_hidden_ND = torch.empty_like(hidden_ND if needs_gradient else hidden_ND[:0])
        # The sum over chunks is kept in fp32: in bf16 each addition would round.
        grad_weight_VD = torch.zeros_like(weight_VD if needs_gradient else weight_VD[:0], dtype=torch.float32)
        for chunk, nats_C, grad_CV in _chunks(hidden_ND, labels_N, lesson, projection, softmax, needs_gradient):
            hidden_CD = hidden_ND[chunk]
            if mask_N is not None:  # the gradients' as well, here on rows of D, not of V, numbers
                nats_C, hidden_CD = nats_C * mask_N[chunk], hidden_CD * mask_N[chunk, None].to(hidden_CD.dtype)
            total += nats_C.sum()
            if needs_gradient and grad_CV is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[chunk])
                add_product(grad_weight_VD, grad_CV.t(), hidden_CD)
            del grad_CV  # freed before the next chunk's logits are made
        if needs_gradient:
            if mask_N is not None:
                grad_hidden_ND.mul_(mask_N[:, None])
            if projection.group:
                torch.distributed.all_reduce(grad_hidden_ND, group=projection.group)
            ctx.save_for_backward(grad_hidden_ND, grad_weight_VD)
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_ND, sum_VD = ctx.saved_tensors
        dtype = grad_hidden_ND.dtype
        grad_weight_VD = sum_VD if sum_VD.dtype == dtype else torch.empty_like(sum_VD, dtype=dtype)
        torch.mul(sum_VD, grad_total, out=grad_weight_VD)  # scaled and rounded in one pass
        # In place: torch raises an error should anybody ask a second time.
        return grad_hidden_ND.mul_(grad_total), grad_weight_VD, None, None, None, None, None, None


def _chunks(
    hidden_ND: Tensor,
    labels_N: Tensor,
    lesson: Lesson | None,
    projection: Projection,
    softmax: Softmax | None,
    needs_gradient: bool,
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield each chunk, its nats [C] and the gradient of its logits [C, V], to which this keeps no reference."""
    num_rows = len(projection.weight_VD)
    rows = chunk_rows(hidden_ND.device.type, len(hidden_ND), num_rows)
    # One buffer for all chunks: on a CPU fresh memory costs as much as what is computed in it.
    buffer_CV = None if softmax else hidden_ND.new_empty(rows, num_rows)
    for start in range(0, len(hidden_ND), rows):
        chunk = slice(start, start + rows)
        taught = (lesson.weight, lesson.probabilities(chunk)) if lesson else None
        tokens = hidden_ND[chunk], labels_N[chunk], taught
        yield chunk, *_nats_and_gradient(*tokens, projection, softmax, buffer_CV, needs_gradient)


def _nats_and_gradient(
    hidden_CD: Tensor,
    labels_C: Tensor,
    taught: tuple[float, Tensor] | None,
    projection: Projection,
    compiled: Softmax | None,
    buffer_CV: Tensor | None,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the nats of a chunk's tokens, [C] in fp32, and the gradient of their sum with respect to logits.

    The gradient is [C, V] in the dtype of the hidden states: within `buffer_CV` (C rows or more), or without one by the
    compiled softmax. `taught` is the teachers' weight, and what they say of the ids of the vocabulary.
    """
    weight_VD, vocab_size, group = projection
    weight, taught_CV = taught or (0.0, None)
    if compiled and needs_gradient and group is None and taught_CV is None:
        return compiled[2](torch.mm(hidden_CD, weight_VD.t()), labels_C, vocab_size)
    num_rows = weight_VD.size(0)
    first_row = group.rank() * num_rows if group else 0
    num_real = min(max(vocab_size - first_row, 0), num_rows)  # rows of this rank that are no padding
    rows_C = labels_C - first_row
    is_local_C = (rows_C >= 0) & (rows_C < num_rows)
    labels_C1 = rows_C.where(is_local_C, 0)[:, None]
    logits_CV = torch.mm(hidden_CD, weight_VD.t(), out=None if buffer_CV is None else buffer_CV[: len(hidden_CD)])
    label_logits_C = logits_CV.gather(1, labels_C1).squeeze(1).float()
    if taught_CV is not None:
        assert group is None, "teachers need the whole vocabulary"
        unnormalized_C = _divergence_from_logits(taught_CV, logits_CV[:, :vocab_size])
    log_sums, softmax, _ = compiled or (softmax_in_place, None, None)
    own_log_sum_C = log_sums(logits_CV, num_real) if num_real else torch.full_like(label_logits_C, float("-inf"))
    log_sum_C = own_log_sum_C
    if group:
        max_C = log_sum_C.clone()
        torch.distributed.all_reduce(max_C, ReduceOp.MAX, group)
        sums_2C = torch.stack([(log_sum_C - max_C).exp(), label_logits_C.where(is_local_C, 0)])
        torch.distributed.all_reduce(sums_2C, ReduceOp.SUM, group)
        sum_C, label_logits_C = sums_2C
        log_sum_C = max_C + sum_C.log()
    label_nats_C = nats_C = log_sum_C - label_logits_C
    if taught_CV is not None:
        nats_C = torch.lerp(label_nats_C, log_sum_C + unnormalized_C, weight)
    if not needs_gradient:
        return nats_C, None
    if softmax:
        grad_CV = softmax(logits_CV, log_sum_C, num_real)
    else:
        grad_CV = logits_CV.mul_((own_log_sum_C - log_sum_C).exp()[:, None]) if group else logits_CV
    # The label's entry, softmax − 1, is computed in fp32: its softmax is near 1 where the model is right. Of a label on
    # another rank the entry of row 0 stays as it is. With teachers: softmax − (1 − w)·label − w·taught.
    of_label_C = (torch.expm1(-label_nats_C) + weight).to(grad_CV.dtype)
    at_labels = torch.arange(len(rows_C), device=rows_C.device), labels_C1.squeeze(1)
    grad_CV[at_labels] = of_label_C.where(is_local_C, grad_CV[at_labels])  # `scatter_` copies all of bf16 on a CPU
    if taught_CV is not None:
        grad_CV[:, :vocab_size].sub_(taught_CV, alpha=weight)
    return nats_C, grad_CV


def _divergence_from_logits(taught_CV: Tensor, logits_CV: Tensor) -> Tensor:
    """Σ p·(log p − logit) of the teachers' p, [C] in fp32: their KL divergence less log Σ exp. In blocks, as below."""
    width = block_rows(logits_CV.device.type, *logits_CV.shape)
    blocks = zip(taught_CV.split(width), logits_CV.split(width), strict=True)
    # Of p = 0 any logarithm will do. `torch.special.entr` takes three times as long on a CPU.
    return torch.cat([p.clamp(min=1e-30).log_().sub_(logits).mul_(p).sum(dim=1) for p, logits in blocks])


def softmax_in_place(logits_CV: Tensor, num_real: int) -> Tensor:
    """Put the softmax over the real rows in place of the logits; return `log_sum_of_exponentials`.

    In blocks of `block_rows`, which stay in a CPU's cache: memory traffic is the cost here.
    """
    logits_CV[:, num_real:] = float("-inf")
    log_sum_C = torch.empty(len(logits_CV), dtype=torch.float32, device=logits_CV.device)
    width = block_rows(logits_CV.device.type, *logits_CV.shape)
    for start in range(0, len(logits_CV), width):
        block = slice(start, start + width)
        numbers_WV = logits_CV[block].float()
        max_W = numbers_WV.amax(dim=1)
        torch.softmax(numbers_WV, dim=1, out=numbers_WV)
        log_sum_C[block] = max_W - numbers_WV.amax(dim=1).log()  # the largest is exp(max − log Σ exp)
        if logits_CV.dtype != torch.float32:
            logits_CV[block] = numbers_WV
        del numbers_WV  # freed before the next block's are made
    return log_sum_C


def log_sum_of_exponentials(logits_CV: Tensor, num_real: int) -> Tensor:
    """log Σ exp over the real rows, [C] in fp32; there must be one."""
    real_CV = _real(logits_CV, num_real)
    max_C1 = real_CV.amax(dim=1, keepdim=True)
    return (max_C1 + (real_CV - max_C1).exp().sum(dim=1, keepdim=True).log()).squeeze(1)


def softmax_of_real(logits_CV: Tensor, log_sum_C: Tensor, num_real: int) -> Tensor:
    """exp(logit − log Σ exp), [C, V] in the dtype of the logits; 0 in the rows that are not real."""
    return (_real(logits_CV, num_real) - log_sum_C[:, None]).exp().to(logits_CV.dtype)


def nats_and_gradient(logits_CV: Tensor, labels_C: Tensor, num_real: int) -> tuple[Tensor, Tensor]:
    """Nats [C] in fp32, and the gradient of their sum [C, V], where there are neither other ranks nor teachers."""
    log_sum_C = log_sum_of_exponentials(logits_CV, num_real)
    rows_V, real_CV = torch.arange(logits_CV.size(1), device=logits_CV.device), _real(logits_CV, num_real)
    is_label_CV = rows_V == labels_C[:, None]
    nats_C = log_sum_C - real_CV.where(is_label_CV, 0).sum(dim=1)
    softmax_CV = (real_CV - log_sum_C[:, None]).exp()
    return nats_C, torch.expm1(-nats_C)[:, None].where(is_label_CV, softmax_CV).to(logits_CV.dtype)


def _real(logits_CV: Tensor, num_real: int) -> Tensor:
    """The logits in fp32, -inf in the rows from `num_real` on."""
    real_V = torch.arange(logits_CV.size(1), device=logits_CV.device) < num_real
    return logits_CV.float().where(real_V, float("-inf"))


SOFTMAX = log_sum_of_exponentials, softmax_of_real, nats_and_gradient
"""The softmax in two parts: ranks that share the vocabulary communicate between them; evaluation needs the first. And
all in one, whose kernel has a row in the cache when it reads it again."""
