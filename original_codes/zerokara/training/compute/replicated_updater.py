"""Replicated data parallelism: ZeRO stage 0, and stage 1 of a lone rank or of optimizers that need whole matrices.

Gradients are accumulated in fp32 over micro batches in one flat buffer, summed over the data-parallel ranks, and
clipped; then every rank updates the tensors that it owns. At stage 0 every rank owns all of them. At stage 1 each
tensor has one owner, which alone keeps its fp32 master weights and its optimizer state, and broadcasts the updated
weights. In bf16 the master weights are rounded into those of the computation; in fp32 they are the same tensors.

The price, beside DeepSpeed's ZeRO: the all-reduce of the gradients does not overlap with the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.distributed
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from zerokara.config.pretrain_config import TrainingSettings
from zerokara.model import parallel
from zerokara.model.builder import Model
from zerokara.training.compute import devices, optimizers, torch_optimizers
from zerokara.training.compute.engine import Accept, Engine, take_weights

CHUNK = 2**26
"""Numbers in one all-reduce: gloo needs as much memory again."""


class ReplicatedUpdater(Engine):
    """An engine that shards no tensor."""

    num_updates = 0

    def __init__(self, model: Model, config: TrainingSettings, has_weights: bool):
        """Take over `model`, whose weights must be fp32: in bf16 their owners keep them as master weights.

        `has_weights`: see `updater.open_engine`.
        """
        super().__init__(model, config)
        in_bf16 = config.precision == "bf16"
        weights = take_weights(model, torch.bfloat16 if in_bf16 else torch.float32, self._device)
        model.to(self._device)
        if in_bf16:
            model.bfloat16()
        self.module = model
        self._group, self._rank = parallel.data_group(), parallel.data_rank()
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self._owners: Mapping[str, int | None] = dict.fromkeys(sizes)
        """The rank that owns each tensor; None where every rank owns all."""
        if config.zero_stage and parallel.data_size() > 1:
            self._owners = optimizers.owners_of(sizes, parallel.data_size())
        self._masters = {
            name: torch.empty(parameter.shape, dtype=torch.float32, device=self._device) if in_bf16 else parameter
            for name, parameter in model.named_parameters()
            if self._is_mine(name)
        }
        self._weights = dict(model.named_parameters())
        self._gradients = self._make_gradients(self._device)
        self._optimizers = torch_optimizers.build(config, self._masters, model.shape)
        torch_optimizers.make_state(config.optimizer_name, self._optimizers, self._masters)
        self._write_local(weights if has_weights else {})

    def _update(self, learning_rate: float, numbers: Tensor, accept: Accept) -> float:
        for chunk in self._flat.split(CHUNK):
            torch.distributed.all_reduce(chunk, group=self._group)
        norm = self._norm()
        norm_value, *values = devices.read(torch.cat([norm.double().view(1), numbers]))
        if accept(values) and math.isfinite(norm_value):
            if self._config.gradient_clipping:
                clip_grads_with_norm_(list(self._masters.values()), self._config.gradient_clipping, norm)
            for optimizer in self._optimizers.values():
                torch_optimizers.set_learning_rate(optimizer.param_groups, learning_rate)
                optimizer.step()
            self.num_updates += 1
            self._broadcast_weights()
        self._flat.zero_()
        return norm_value

    def _read(self, name: str, key: str | None) -> Tensor:
        local = self._at(name, key) if self._is_mine(name) else None
        if self._owners[name] is None:
            assert local is not None
            return local
        if local is None:
            shape = self._shapes[name]
            shape = shape if key is None else optimizers.state_shapes(self._config.optimizer_name, name, shape)[key]
            local = torch.empty(shape, dtype=torch.float32, device=self._flat.device)
        torch.distributed.broadcast(local, group=self._group, group_src=self._owners[name])
        return local

    def _write(self, name: str, key: str | None, value: Tensor) -> None:
        if self._is_mine(name):
            self._at(name, key).copy_(value)

    def _take_up_written(self, num_updates: int) -> None:
        self.num_updates = num_updates
        torch_optimizers.set_count(self._optimizers, num_updates)
        self._broadcast_weights()

    def _is_mine(self, name: str) -> bool:
        return self._owners[name] in (None, self._rank)

    def _at(self, name: str, key: str | None) -> Tensor:
        master = self._masters[name]
        if key is None:
            return master.detach()
        rule = optimizers.algorithm_of(self._config.optimizer_name, name, tuple(master.shape))
        tensor: Tensor = self._optimizers[rule].state[master][key]
        return tensor

    def _make_gradients(self, device: torch.device) -> dict[str, Tensor]:
        """One flat buffer in fp32, and each parameter's part of it."""
        self._flat = torch.zeros(sum(w.numel() for w in self._weights.values()), dtype=torch.float32, device=device)
        parts = self._flat.split([weight.numel() for weight in self._weights.values()])
        gradients = {
            name: part.view_as(weight) for (name, weight), part in zip(self._weights.items(), parts, strict=True)
        }
        for name, weight in self._weights.items():
            if weight.dtype == torch.float32:
                weight.grad = gradients[name]  # torch adds to a gradient that is there in place
            else:
                weight.register_post_accumulate_grad_hook(_adding_to(gradients[name]))
        for name, master in self._masters.items():
            master.grad = gradients[name]
        return gradients

    def _norm(self) -> Tensor:
        """The gradient norm over all parameters; what tensor-parallel ranks replicate counts once."""
        counted = [
            gradient
            for name, gradient in self._gradients.items()
            if parallel.tensor_rank() == 0 or not self._sharding.is_replicated(name)
        ]
        norm = get_total_norm(counted)
        if parallel.tensor_size() == 1:
            return norm
        square = norm.square()
        torch.distributed.all_reduce(square, group=parallel.tensor_group())
        return square.sqrt()

    @torch.no_grad()
    def _broadcast_weights(self) -> None:
        """Round the master weights into those of the computation, and broadcast them to the other ranks."""
        broadcasts = []
        for name, weight in self._weights.items():
            if self._is_mine(name) and weight is not self._masters[name]:
                weight.copy_(self._masters[name])
            if (owner := self._owners[name]) is not None:
                broadcasts.append(
                    torch.distributed.broadcast(weight.detach(), group=self._group, group_src=owner, async_op=True)
                )
        for work in broadcasts:
            work.wait()


def _adding_to(gradient: Tensor) -> Callable[[Tensor], None]:
    def add(weight: Tensor) -> None:
        assert weight.grad is not None
        gradient.add_(weight.grad)
        weight.grad = None

    return add
