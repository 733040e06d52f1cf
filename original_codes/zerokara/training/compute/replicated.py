"""Replicated data parallelism: ZeRO stage 0, and stage 1 of a lone rank or of optimizers that need whole matrices.

Gradients are accumulated in fp32 over micro batches in one flat buffer, summed over the data-parallel ranks, and
clipped; then every rank updates the tensors that it owns. At stage 0 every rank owns all of them. At stage 1 each
tensor has one owner, which alone keeps its fp32 master weights and its optimizer state, and broadcasts the updated
weights. In bf16 the master weights are rounded into those of the computation; in fp32 they are the same tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from zerokara.config.pretrain_config import TrainingSettings
from zerokara.model import parallel
from zerokara.model.builder import Model
from zerokara.training.compute import optimizers, torch_optimizers
from zerokara.training.compute.engine import Accept, read_once

CHUNK = 2**26
"""Numbers in one all-reduce: gloo needs as much memory again."""


class ReplicatedEngine:
    """An `engine.Engine` that shards no tensor."""

    num_updates = 0

    def __init__(self, model: Model, config: TrainingSettings, device: torch.device):
        """See `updater.open_engine`."""
        self.model, self._device, self._clipping = model, device, config.gradient_clipping
        self.module: torch.nn.Module = model
        self.optimizer_name: str = config.optimizer_name
        in_bf16 = config.precision == "bf16"
        dtype = torch.bfloat16 if in_bf16 else torch.float32
        for parameter in model.parameters():  # undefined weights, without a copy of those that it has
            parameter.data = torch.empty(parameter.shape, dtype=dtype, device=device)
        model.to(device, dtype)  # its buffers
        if model.auxiliary:
            model.auxiliary.set_weight(0.0, device)  # the compiler looks at where the weight is
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self._owners: Mapping[str, int | None] = dict.fromkeys(sizes)
        """The rank that owns each tensor; None where every rank owns all."""
        if config.zero_stage and parallel.data_size() > 1:
            self._owners = optimizers.owners_of(sizes, parallel.data_size())
        self._weights = dict(model.named_parameters())
        self._masters = {
            name: torch.empty(weight.shape, dtype=torch.float32, device=device) if in_bf16 else weight
            for name, weight in self._weights.items()
            if self._owners[name] in (None, parallel.data_rank())
        }
        self._flat = torch.zeros(sum(sizes.values()), dtype=torch.float32, device=device)
        self._gradients: dict[str, Tensor] = {}
        """Each parameter's part of the flat buffer, to which backward passes add."""
        for (name, weight), part in zip(self._weights.items(), self._flat.split(list(sizes.values())), strict=True):
            self._gradients[name] = gradient = part.view_as(weight)
            if in_bf16:
                weight.register_post_accumulate_grad_hook(partial(_move_gradient, gradient))
            else:
                weight.grad = gradient  # torch adds to a gradient that is there in place
            if name in self._masters:
                self._masters[name].grad = gradient
        self._optimizers = torch_optimizers.build(config, self._masters, model.shape)
        torch_optimizers.make_state(config.optimizer_name, self._optimizers, self._masters)

    def accumulate(self, batch: list[Tensor], global_tokens: float, global_sequences: float | None = None) -> Tensor:
        if self.model.auxiliary:
            sequences = global_sequences or global_tokens / self.model.shape.target_len
            self.model.auxiliary.set_weight(1 / sequences, self._device)
        nats: Tensor = self.module(*batch)
        (nats / global_tokens).backward()
        return nats.detach()

    def update(self, learning_rate: float, numbers: Tensor | None = None, accept: Accept = lambda _: True) -> float:
        for chunk in self._flat.split(CHUNK):
            torch.distributed.all_reduce(chunk, group=parallel.data_group())
        # What tensor-parallel ranks replicate counts once.
        counts_all, is_replicated = parallel.tensor_rank() == 0, self.model.sharding.is_replicated
        norm = get_total_norm([part for name, part in self._gradients.items() if counts_all or not is_replicated(name)])
        if parallel.tensor_size() > 1:
            square = norm.square()
            torch.distributed.all_reduce(square, group=parallel.tensor_group())
            norm = square.sqrt()
        norm_value, values = read_once(norm, numbers)
        if accept(values) and math.isfinite(norm_value):
            if self._clipping:
                clip_grads_with_norm_(list(self._masters.values()), self._clipping, norm)
            for optimizer in self._optimizers.values():
                torch_optimizers.set_learning_rate(optimizer.param_groups, learning_rate)
                optimizer.step()
            self.num_updates += 1
            self._round_and_broadcast()
        self._flat.zero_()
        return norm_value

    def read(self, name: str, key: str | None) -> Tensor:
        if name in self._masters:
            local = self._local(name, key)
        else:
            shape = tuple(self._weights[name].shape)
            shape = shape if key is None else optimizers.state_shapes(self.optimizer_name, name, shape)[key]
            local = torch.empty(shape, dtype=torch.float32, device=self._device)
        if (owner := self._owners[name]) is not None:
            torch.distributed.broadcast(local, group=parallel.data_group(), group_src=owner)
        return local

    def write(self, name: str, key: str | None, value: Tensor) -> None:
        if name in self._masters:
            self._local(name, key).copy_(value)

    def _local(self, name: str, key: str | None) -> Tensor:
        master = self._masters[name]
        if key is None:
            return master.detach()
        algorithm = optimizers.algorithm_of(self.optimizer_name, name, tuple(master.shape))
        tensor: Tensor = self._optimizers[algorithm].state[master][key]
        return tensor

    def sync_from_master(self, num_updates: int) -> None:
        self.num_updates = num_updates
        for optimizer in self._optimizers.values():
            for state in optimizer.state.values():
                state["step"].fill_(num_updates)
        self._round_and_broadcast()

    @torch.no_grad()
    def _round_and_broadcast(self) -> None:
        """Round the master weights into those of the computation, and broadcast them from their owners."""
        broadcasts = []
        for name, weight in self._weights.items():
            if name in self._masters and weight is not self._masters[name]:
                weight.copy_(self._masters[name])
            if (owner := self._owners[name]) is not None:
                group, data = parallel.data_group(), weight.detach()
                broadcasts.append(torch.distributed.broadcast(data, group=group, group_src=owner, async_op=True))
        for work in broadcasts:
            work.wait()


def _move_gradient(to: Tensor, weight: Tensor) -> None:
    assert weight.grad is not None
    to.add_(weight.grad)
    weight.grad = None
