"""A mixture of experts: many feed-forward networks in one layer, of which a router gives each token a few.

Stands in a megatron-core layer (0.16.1) as its `mlp`. megatron-core's own MoELayer is not used: without Transformer
Engine it computes expert by expert in modules of their own (under ZeRO 3 those that no token came to would make
processes wait for each other), opens a CUDA stream when it is built, balances over whatever micro batch it is given,
and refuses tensor parallelism without sequence parallelism. Here the matrices of all experts are one parameter.

The router's logits, in fp32, go through a softmax; a token takes the k likeliest experts, weighted by their
probability, for k > 1 divided by their sum (Mixtral; Switch Transformer for k = 1). In training two losses are added
(`auxiliary`), each a mean over the tokens of a sequence: `balance`, X · Σ f_i · P_i with f_i the share of the choices
that fell on expert i and P_i its mean probability, 1 where all are equally busy (Fedus et al., 2022); and `z`, the
squared log of the sum of exponentials (Zoph et al., 2022). By sequence, and not by batch: so neither the micro batch
nor the number of processes changes what is learned.

With a capacity c an expert takes at most ⌈c · k · S / X⌉ of a sequence's choices in training, the first ones, so that
no token depends on a later one; the others add nothing. Validation takes all.

Shape suffixes: S sequence, B batch, N = B·S tokens, D width, X experts, k choices of a token, M = N·k choices, F inner
width, R rows of the rising matrix (2F where there is a gate).
"""

from __future__ import annotations

import zerokara.model.import_megatron  # noqa: F401  # before megatron-core

# isort: split
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import grouped_mm, linear, one_hot

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import parallel
from zerokara.model.auxiliary import Auxiliary


@dataclass(frozen=True)
class Routing:
    """How routers are trained; nothing of it is part of the model."""

    balance: float = 0.0
    """Weight of the loss that keeps experts equally busy."""
    z: float = 0.0
    """Weight of the loss that keeps logits small."""
    capacity: float = 0.0
    """c; 0 is no limit."""

    @classmethod
    def from_config(cls, config: PretrainConfig) -> Routing:
        """As a run has it."""
        return cls(config.router_aux_loss_coef, config.router_z_loss_coef, config.expert_capacity_factor)


class Matrices(torch.nn.Module):
    """A parameter without a computation of its own."""

    def __init__(self, *size: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size))


class Experts(torch.nn.Module):
    """The `mlp` of a sparse layer: [S, B, D] in and out."""

    def __init__(self, config: TransformerConfig):
        """As megatron-core builds it; what it needs stands in the configuration under megatron-core's names."""
        super().__init__()
        assert config.num_moe_experts and config.moe_ffn_hidden_size, "a sparse layer has experts"
        self.num_experts, self.top_k = config.num_moe_experts, config.moe_router_topk
        self.balance, self.z = float(config.moe_aux_loss_coeff), float(config.moe_z_loss_coeff or 0.0)
        self.capacity = float(config.moe_expert_capacity_factor or 0.0)
        self._activation, self._gated = config.activation_func, config.gated_linear_unit
        rising = config.moe_ffn_hidden_size * (2 if self._gated else 1)
        self.router = Matrices(self.num_experts, config.hidden_size)
        self.experts_fc1 = Matrices(self.num_experts, rising, config.hidden_size)
        self.experts_fc2 = Matrices(self.num_experts, config.hidden_size, config.moe_ffn_hidden_size)
        self.shared = Auxiliary()
        self.seen = Seen(self.num_experts)

    def forward(self, hidden_SBD: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, None]:
        """Give each token the weighted sum of what its experts make of it; no bias, as megatron-core asks for one."""
        assert padding_mask is None
        length, batch, width = hidden_SBD.shape
        logits_SBX = linear(hidden_SBD.float(), self.router.weight.float())
        probabilities_SBX = logits_SBX.softmax(dim=-1)
        weights_SBk, chosen_SBk = probabilities_SBX.topk(self.top_k, dim=-1)
        if self.top_k > 1:
            weights_SBk = weights_SBk / weights_SBk.sum(dim=-1, keepdim=True)
        taken_SBk = self._taken(chosen_SBk)
        if self.training and torch.is_grad_enabled():
            self.seen.add(probabilities_SBX.detach(), chosen_SBk, taken_SBk)
            weights_SBk = self.shared.added(weights_SBk, self._loss(logits_SBX, probabilities_SBX, chosen_SBk))
        flat_ND = hidden_SBD.reshape(length * batch, width)
        made_MD = self._computed(flat_ND, chosen_SBk.reshape(-1))
        weights_Nk1 = (weights_SBk * taken_SBk).reshape(-1, self.top_k, 1).to(made_MD.dtype)
        made_ND = (made_MD.view(-1, self.top_k, width) * weights_Nk1).sum(dim=1)
        return made_ND.view(length, batch, width), None

    def _taken(self, chosen_SBk: Tensor) -> Tensor:
        """1 where a choice finds room with its expert, else 0."""
        if not (self.training and self.capacity):
            return torch.ones_like(chosen_SBk)
        length, batch, top_k = chosen_SBk.shape
        room = math.ceil(self.capacity * top_k * length / self.num_experts)
        by_sequence = one_hot(chosen_SBk.transpose(0, 1).reshape(batch, length * top_k), self.num_experts)
        places = (by_sequence.cumsum(dim=1) * by_sequence).sum(dim=-1)  # 1 for the first that comes to an expert
        return (places <= room).view(batch, length, top_k).transpose(0, 1).to(chosen_SBk.dtype)

    def _loss(self, logits_SBX: Tensor, probabilities_SBX: Tensor, chosen_SBk: Tensor) -> Tensor:
        """Both losses, summed over the sequences."""
        length = logits_SBX.size(0)
        shares_BX = one_hot(chosen_SBk, self.num_experts).sum(dim=(0, 2)).to(logits_SBX.dtype) / (length * self.top_k)
        balance = self.num_experts * (shares_BX * probabilities_SBX.mean(dim=0)).sum()
        z = logits_SBX.logsumexp(dim=-1).square().mean(dim=0).sum()
        return self.balance * balance + self.z * z

    def _computed(self, flat_ND: Tensor, chosen_M: Tensor) -> Tensor:
        """What each choice's expert makes of its token, [M, D]."""
        order_M = chosen_M.argsort(stable=True)
        sorted_MD = flat_ND[order_M // self.top_k]
        counts_X = torch.bincount(chosen_M, minlength=self.num_experts)
        if flat_ND.is_cuda and flat_ND.dtype == torch.bfloat16:
            made_MD = self._grouped(sorted_MD, counts_X.cumsum(0).to(torch.int32))
        else:
            made_MD = self._one_by_one(sorted_MD, counts_X.tolist())
        back_M = torch.empty_like(order_M)
        back_M[order_M] = torch.arange(len(order_M), device=order_M.device)
        return made_MD[back_M]

    def _one_by_one(self, sorted_MD: Tensor, counts: list[int]) -> Tensor:
        parts = zip(sorted_MD.split(counts), self.experts_fc1.weight, self.experts_fc2.weight, strict=True)
        return torch.cat([linear(self._between(linear(part, fc1)), fc2) for part, fc1, fc2 in parts])

    def _grouped(self, sorted_MD: Tensor, ends_X: Tensor) -> Tensor:
        """All experts in one kernel; `ends_X` is where each one's tokens end."""
        inner = grouped_mm(sorted_MD, self.experts_fc1.weight.transpose(1, 2), offs=ends_X)
        made_MD: Tensor = grouped_mm(self._between(inner), self.experts_fc2.weight.transpose(1, 2), offs=ends_X)
        return made_MD

    def _between(self, inner_MR: Tensor) -> Tensor:
        if not self._gated:
            activated: Tensor = self._activation(inner_MR)
            return activated
        gate_MF, up_MF = inner_MR.chunk(2, dim=-1)
        gated: Tensor = self._activation(gate_MF) * up_MF
        return gated


class Seen:
    """What a router did in training since it was last asked."""

    def __init__(self, num_experts: int):
        self._num_experts = num_experts
        self._sums: Tensor | None = None

    def add(self, probabilities_SBX: Tensor, chosen_SBk: Tensor, taken_SBk: Tensor) -> None:
        """Note a forward pass; one that is done twice weighs twice, which changes no share."""
        load_X = torch.bincount(chosen_SBk.reshape(-1), minlength=self._num_experts)
        entropy = -torch.special.xlogy(probabilities_SBX, probabilities_SBX).sum()
        tokens = probabilities_SBX.size(0) * probabilities_SBX.size(1)
        others = torch.stack([taken_SBk.sum(), entropy, entropy.new_tensor(tokens)]).double()
        sums = torch.cat([load_X.double(), others])
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self) -> Tensor | None:
        """The sums so far, which begin anew: choices of each expert, choices that found room, entropy, tokens."""
        sums, self._sums = self._sums, None
        return sums


def experts_of(layers: Sequence[torch.nn.Module]) -> list[Experts]:
    """Those of the sparse layers, in order."""
    return [layer.mlp for layer in layers if isinstance(layer.mlp, Experts)]


def statistics(layers: Sequence[torch.nn.Module]) -> dict[str, list[float]]:
    """What the routers did in training since this was last asked, over all processes, by sparse layer.

    ``expert_load`` is the busiest expert's load over the mean, ``expert_dropped`` the share of choices that found no
    room, ``router_entropy`` the nats of a token's probabilities. Every process must ask; empty where there are none.
    """
    taken = [experts.seen.take() for experts in experts_of(layers)]
    sums = [each for each in taken if each is not None]
    if not sums:
        return {}
    together_LX = torch.stack(sums)
    torch.distributed.all_reduce(together_LX, group=parallel.data_group())
    load_LX, (found_L, entropy_L, tokens_L) = together_LX[:, :-3], together_LX[:, -3:].unbind(dim=1)
    return {
        "expert_load": (load_LX.amax(dim=1) / load_LX.mean(dim=1)).tolist(),
        "expert_dropped": (1 - found_L / load_LX.sum(dim=1)).tolist(),
        "router_entropy": (entropy_L / tokens_L).tolist(),
    }
