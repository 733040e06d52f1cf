"""Mixture of experts (MoE): many feed-forward networks in one layer; a router sends each token to a few of them.

Stands in a megatron-core layer (0.16.1) as its `mlp`. megatron-core's own MoELayer is not used: without Transformer
Engine it computes expert by expert in modules of their own (under ZeRO 3 those without a token would make processes
wait for each other), opens a CUDA stream when it is built, balances over whatever micro batch it is given, and refuses
tensor parallelism without sequence parallelism. Here the matrices of all experts are one parameter.

The router's logits, in fp32, go through a softmax; a token goes to its top k experts, weighted by their probability,
for k > 1 divided by their sum (Mixtral; Switch Transformer for k = 1). Training adds two auxiliary losses
(`AuxiliaryLoss`), each a mean over the tokens of a sequence: the load-balancing loss X · Σ f_i · P_i, with f_i the
fraction of choices that fell on expert i and P_i its mean probability, 1 where all are equally loaded (Fedus et al.,
2022); and the z-loss, the squared log of the sum of exponentials (Zoph et al., 2022). By sequence, and not by batch: so
neither the micro batch nor the number of processes changes what is learned.

With a capacity factor c an expert takes at most ⌈c · k · S / X⌉ of a sequence's choices in training, the first ones, so
that no token depends on a later one; the others are dropped and add nothing. Validation drops none.

For packed examples the capacity is per example, and S is its length: an example drops what it would drop alone. The
losses stay means over a sequence, a whole row, without its padding: an example of a few tokens cannot load all experts
alike. Padding goes through experts as well, and counts nowhere.

Shape suffixes: S sequence, B batch, N = B·S tokens, D hidden size, X experts, k choices of a token, M = N·k choices,
F feed-forward size of an expert, R rows of `experts_fc1` (2F with a gate).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.nn.functional import grouped_mm, linear

from zerokara.model import parallel
from zerokara.model.layers import Kernels, plain_activate, sequence_first
from zerokara.model.megatron_core import TransformerConfig

PADDING = -1
"""The number of an example where there is none."""


class AuxiliaryLoss:
    """The weight of the auxiliary losses, shared by the layers of one model.

    The sum over sequences of such a loss gets the gradient `weight`, a tensor that is set before each forward pass
    (`Engine.accumulate`): it is an input of the layer as its activations are, so a compiled backward pass reads the
    value of its own micro batch. The value of the training loss does not change. This holds under activation
    checkpointing too. megatron-core's MoEAuxLossAutoScaler (transformer/moe/moe_utils.py, 0.16.1) reads a global scale
    in its backward pass instead, which a compiler would freeze.
    """

    def __init__(self) -> None:
        self.weight = torch.zeros(())
        """Gradient of one sequence's auxiliary loss, in fp32 on the model's device; 0 unless a trainer sets it."""

    def set_weight(self, weight: float, device: torch.device) -> None:
        """Set the weight for the next forward pass and its backward pass."""
        if self.weight.device != device:
            self.weight = torch.zeros((), device=device)
        self.weight.fill_(weight)


class _Attach(torch.autograd.Function):
    """The activations unchanged; their backward pass adds the gradient of `loss`, a sum over sequences, by `weight`."""

    @staticmethod
    def forward(ctx: Any, activations: Tensor, loss: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return activations.view_as(activations)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grad, weight, None


class _Weight(torch.nn.Module):
    """A parameter without a computation."""

    def __init__(self, *size: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size))


class MixtureOfExperts(torch.nn.Module):
    """The `mlp` of an MoE layer: [S, B, D] in and out, as hidden states lie (`layers`); the router sees [S, B]."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        assert config.num_moe_experts and config.moe_ffn_hidden_size, "an MoE layer has experts"
        self.num_experts, self.top_k = config.num_moe_experts, config.moe_router_topk
        self.aux_loss_coef, self.z_loss_coef = float(config.moe_aux_loss_coeff), float(config.moe_z_loss_coeff or 0.0)
        self.capacity_factor = float(config.moe_expert_capacity_factor or 0.0)
        self._activation, self._gated = config.activation_func, config.gated_linear_unit
        rows = config.moe_ffn_hidden_size * (2 if self._gated else 1)
        self.router = _Weight(self.num_experts, config.hidden_size)
        self.experts_fc1 = _Weight(self.num_experts, rows, config.hidden_size)
        self.experts_fc2 = _Weight(self.num_experts, config.hidden_size, config.moe_ffn_hidden_size)
        self.auxiliary, self.kernels = AuxiliaryLoss(), Kernels()
        self.counts = RouterCounts(self.num_experts)

    def forward(self, hidden_SBD: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, None]:
        """Return for each token the weighted sum of its experts' outputs, and None for megatron-core's bias.

        `padding_mask`, as megatron-core calls it, is the packed example at each position, `PADDING` behind the
        examples, [B, S]; None where each sequence is one, without padding.
        """
        real_SB = None if padding_mask is None else (padding_mask != PADDING).transpose(0, 1)
        hidden_ND = hidden_SBD.flatten(0, 1)
        logits_SBX = sequence_first(linear(hidden_SBD.float(), self.router.weight.float()))
        probabilities_SBX = logits_SBX.softmax(dim=-1)
        weights_SBk, chosen_SBk = probabilities_SBX.topk(self.top_k, dim=-1)
        if self.top_k > 1:
            weights_SBk = weights_SBk / weights_SBk.sum(dim=-1, keepdim=True)
        kept_SBk = self._within_capacity(chosen_SBk, padding_mask)
        if self.training and torch.is_grad_enabled():
            self.counts.add(probabilities_SBX.detach(), chosen_SBk, kept_SBk, real_SB)
            loss = self._auxiliary_loss(logits_SBX, probabilities_SBX, chosen_SBk, real_SB)
            weights_SBk = _Attach.apply(weights_SBk, loss, self.auxiliary.weight)
        out_MD = self._apply_experts(hidden_ND, sequence_first(chosen_SBk).reshape(-1))
        weights_Nk1 = sequence_first(weights_SBk * kept_SBk).reshape(-1, self.top_k, 1).to(out_MD.dtype)
        out_ND = (out_MD.unflatten(0, (-1, self.top_k)) * weights_Nk1).sum(dim=1)
        return out_ND.view_as(hidden_SBD), None

    def _within_capacity(self, chosen_SBk: Tensor, examples_BS: Tensor | None = None) -> Tensor:
        """1 where a choice is within its expert's capacity, 0 where it is dropped."""
        if not (self.training and self.capacity_factor):
            return torch.ones_like(chosen_SBk)
        length, batch, top_k = chosen_SBk.shape
        rows_B = torch.arange(batch, device=chosen_SBk.device)
        group_SB = rows_B.expand(length, batch)
        if examples_BS is not None:  # and padding is a group as well
            group_SB = rows_B * (length + 1) + examples_BS.transpose(0, 1) - PADDING
        group_N = group_SB.flatten()
        counts = group_N.new_zeros(batch * (length + 1)).scatter_add(0, group_N, torch.ones_like(group_N))
        length_SB = counts[group_SB]
        earlier_SBk = _num_earlier((group_SB[..., None] * self.num_experts + chosen_SBk).flatten()).view_as(chosen_SBk)
        # Of n earlier choices n < ⌈a / X⌉, which is n · X < a: without a division, which devices round differently.
        allowed_SB = length_SB.double() * (self.capacity_factor * top_k)
        return (earlier_SBk * self.num_experts < allowed_SB[..., None]).to(chosen_SBk.dtype)

    def _auxiliary_loss(
        self, logits_SBX: Tensor, probabilities_SBX: Tensor, chosen_SBk: Tensor, real_SB: Tensor | None = None
    ) -> Tensor:
        """Load-balancing loss and z-loss with their coefficients, summed over the sequences.

        The means are over the positions where `real_SB` is True; a sequence without any adds nothing.
        """
        # Not torch's one_hot: it asks a CPU for the largest number, and torch.compile for its bound.
        experts_X = torch.arange(self.num_experts, device=chosen_SBk.device)
        chosen_SBX = (chosen_SBk[..., None] == experts_X).to(chosen_SBk.dtype).sum(dim=2)
        num_real: int | Tensor = len(chosen_SBX)
        if real_SB is not None:
            chosen_SBX, num_real = chosen_SBX * real_SB[..., None], real_SB.sum(dim=0).clamp(min=1)[:, None]
        shares_BX = chosen_SBX.sum(dim=0).to(logits_SBX.dtype) / (num_real * self.top_k)
        balance = self.num_experts * (shares_BX * _mean(probabilities_SBX, real_SB)).sum()
        z = _mean(logits_SBX.logsumexp(dim=-1, keepdim=True).square(), real_SB).sum()
        return self.aux_loss_coef * balance + self.z_loss_coef * z

    def _apply_experts(self, hidden_ND: Tensor, chosen_M: Tensor) -> Tensor:
        """The output of each choice's expert for its token, [M, D]."""
        order_M = chosen_M.argsort(stable=True)
        sorted_MD = hidden_ND[order_M // self.top_k]
        # Not bincount, which asks the device for its largest number.
        experts_X = torch.arange(self.num_experts, device=chosen_M.device)
        ends_X = torch.searchsorted(chosen_M[order_M], experts_X, right=True, out_int32=True)
        at_once = has_kernel(hidden_ND, self.experts_fc2.weight.shape[-1])
        out_MD = self._grouped(sorted_MD, ends_X) if at_once else self._one_by_one(sorted_MD, ends_X)
        inverse_M = torch.empty_like(order_M)
        inverse_M[order_M] = torch.arange(len(order_M), device=order_M.device)
        return out_MD[inverse_M]

    def _one_by_one(self, sorted_MD: Tensor, ends_X: Tensor) -> Tensor:
        counts = ends_X.diff(prepend=ends_X.new_zeros(1)).tolist()
        # Not `kernels.activate`: it would be compiled for each count of tokens.
        act = partial(plain_activate, bias_R=None, activation=self._activation, gated=self._gated)
        parts = zip(sorted_MD.split(counts), self.experts_fc1.weight, self.experts_fc2.weight, strict=True)
        return torch.cat([linear(act(linear(part, fc1)), fc2) for part, fc1, fc2 in parts])

    def _grouped(self, sorted_MD: Tensor, ends_X: Tensor) -> Tensor:
        """All experts in one kernel; `ends_X` is where each one's tokens end."""
        is_used_X = ends_X.diff(prepend=ends_X.new_zeros(1)) > 0
        fc1_XRD, fc2_XDF = (
            _GradientOfUsed.apply(part.weight, is_used_X) for part in (self.experts_fc1, self.experts_fc2)
        )
        inner_MR = grouped_mm(sorted_MD, fc1_XRD.transpose(1, 2), offs=ends_X)
        inner_MF = self.kernels.activate(inner_MR, None, self._activation, self._gated)
        out_MD: Tensor = grouped_mm(inner_MF, fc2_XDF.transpose(1, 2), offs=ends_X)
        return out_MD


def has_kernel(hidden: Tensor, inner: int) -> bool:
    """True if `grouped_mm` computes all experts at once for such hidden states and an inner size: the rows of its
    matrices must be whole blocks of 16 bytes."""
    return hidden.is_cuda and hidden.dtype == torch.bfloat16 and hidden.shape[-1] % 8 == inner % 8 == 0


def _mean(values_SBX: Tensor, real_SB: Tensor | None) -> Tensor:
    """Mean over the real positions of each sequence, [B, X]; 0 where there are none."""
    if real_SB is None:
        return values_SBX.mean(dim=0)
    return (values_SBX * real_SB[..., None]).sum(dim=0) / real_SB.sum(dim=0).clamp(min=1)[:, None]


def _num_earlier(number_M: Tensor) -> Tensor:
    """Number of earlier occurrences of each number, [M]."""
    order_M = number_M.argsort(stable=True)
    sorted_M = number_M[order_M]
    ranks_M = torch.arange(len(order_M), device=order_M.device) - torch.searchsorted(sorted_M, sorted_M)
    return torch.empty_like(order_M).scatter(0, order_M, ranks_M)


class _GradientOfUsed(torch.autograd.Function):
    """The weights of all experts; in the backward pass 0 for the experts without a token, whatever was computed there.

    On some GPUs grouped_mm leaves these parts of its gradient unwritten (pytorch issue 172439).
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, is_used_X: Tensor) -> Tensor:
        ctx.save_for_backward(is_used_X)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (is_used_X,) = ctx.saved_tensors
        return grad.where(is_used_X[:, None, None], 0), None


class RouterCounts:
    """Sums over what a router did in training since they were last taken."""

    def __init__(self, num_experts: int):
        self._num_experts = num_experts
        self.reset(torch.device("cpu"))

    def reset(self, device: torch.device) -> None:
        """Begin with nothing, on the device of the hidden states."""
        # Never absent: a compiled layer would be compiled once more for its second call.
        self._sums = torch.zeros(self._num_experts + 3, dtype=torch.float64, device=device)

    def add(
        self, probabilities_SBX: Tensor, chosen_SBk: Tensor, kept_SBk: Tensor, real_SB: Tensor | None = None
    ) -> None:
        """Count the real positions of a forward pass; a recomputed one counts twice, which changes no share."""
        if real_SB is None:
            real_SB = torch.ones_like(chosen_SBk[..., 0], dtype=torch.bool)
        chosen_M, real_SBk = chosen_SBk.reshape(-1), real_SB[..., None].expand_as(chosen_SBk).to(chosen_SBk.dtype)
        load_X = chosen_M.new_zeros(self._num_experts).scatter_add(0, chosen_M, real_SBk.reshape(-1))
        entropy_SBX = -torch.special.xlogy(probabilities_SBX, probabilities_SBX)
        entropy = (entropy_SBX * real_SB[..., None]).sum()
        others = torch.stack([(kept_SBk * real_SBk).sum().to(entropy.dtype), entropy, real_SB.sum(dtype=entropy.dtype)])
        self._sums = self._sums.to(entropy.device) + torch.cat([load_X.double(), others.double()])

    def take(self) -> Tensor:
        """Return the sums, and reset them: choices of each expert, choices kept, entropy, tokens."""
        sums = self._sums
        self.reset(sums.device)
        return sums


def experts_of(layers: Sequence[torch.nn.Module]) -> list[MixtureOfExperts]:
    """The mixtures of the MoE layers, in order."""
    return [layer.mlp for layer in layers if isinstance(layer.mlp, MixtureOfExperts)]


def statistics(layers: Sequence[torch.nn.Module]) -> dict[str, list[float]]:
    """Router statistics of training since the last call, over all data-parallel ranks, a value for each MoE layer.

    ``expert_load`` is the busiest expert's load over the mean, ``expert_dropped`` the share of choices over capacity,
    ``router_entropy`` the entropy in nats of a token's probabilities. Every process must call it. Empty where there are
    no experts, or nothing was counted.
    """
    if not (sums := [experts.counts.take() for experts in experts_of(layers)]):
        return {}
    sums_LX = torch.stack(sums)
    torch.distributed.all_reduce(sums_LX, group=parallel.data_group())
    if not sums_LX.any():
        return {}
    load_LX, (kept_L, entropy_L, tokens_L) = sums_LX[:, :-3], sums_LX[:, -3:].unbind(dim=1)
    return {
        "expert_load": (load_LX.amax(dim=1) / load_LX.mean(dim=1)).tolist(),
        "expert_dropped": (1 - kept_L / load_LX.sum(dim=1)).tolist(),
        "router_entropy": (entropy_L / tokens_L).tolist(),
    }
