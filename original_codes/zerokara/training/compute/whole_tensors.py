"""Data parallel training by whole tensors: ZeRO stage 0, and stage 1 of a lone process or of rules that need matrices.

Gradients are added up in fp32 over micro batches and processes, in one flat buffer; clipped; and every process updates
the tensors that it owns, whole. At stage 0 it owns all of them. At stage 1 each tensor has one owner, which alone keeps
its fp32 weights and its optimizer's state, and hands the updated weights to the others. In bf16 the owner's fp32
weights are rounded into those of the computation; in fp32 they are the same.

This is not DeepSpeed's: its stage 0 adds gradients up in bf16 (runtime/engine.py, 0.19.8), and its stages 1 to 3 cut
matrices anywhere. The price is that the gradient's way between the processes does not overlap with the backward pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from zerokara.config import PretrainConfig
from zerokara.model import parallel
from zerokara.model.megatron import Model
from zerokara.model.sharding import Cut
from zerokara.training.compute import devices, optimizers
from zerokara.training.compute.ownership import owners_of

CHUNK = 2**26
"""Numbers that are summed over the processes at a time: gloo needs as much room again."""


class WholeTensors:
    """An `engine.Updater`: a model whose tensors stay whole."""

    def __init__(self, model: Model, config: PretrainConfig):
        """Take over `model`, whose weights must be fp32: in bf16 they live on, unrounded, with their owners."""
        device = devices.local_device(int(os.environ.get("LOCAL_RANK", "0")))
        model.to(device)
        self.module = model
        self._config = config
        self._group, self._rank = parallel.data_group(), parallel.data_rank()
        self._owners = self._dealt(model, parallel.data_size() if config.zero_stage else 1)
        in_bf16 = config.precision == "bf16"
        self._masters = {
            name: parameter.detach().clone() if in_bf16 else parameter
            for name, parameter in model.named_parameters()
            if self._is_mine(name)
        }
        if in_bf16:
            model.bfloat16()
        self._weights = dict(model.named_parameters())
        self._gradients = self._make_gradients(device)
        self._optimizers = optimizers.build(config, self._masters, model.shape)
        optimizers.make_state(config.optimizer, self._optimizers, self._masters)
        self.num_updates = 0

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`; what counts is its sum over micro batches and processes."""
        loss.backward()

    def finish_micro_batch(self) -> None:
        """Nothing to do between micro batches."""

    def update(self, learning_rate: float) -> float:
        """Clip, update, clear; gives the norm before clipping. A norm that is not finite changes no weight."""
        for chunk in self._flat.split(CHUNK):
            torch.distributed.all_reduce(chunk, group=self._group)
        norm = self._norm()
        if torch.isfinite(norm):
            if self._config.gradient_clipping:
                clip_grads_with_norm_(list(self._masters.values()), self._config.gradient_clipping, norm)
            for optimizer in self._optimizers.values():
                optimizers.set_learning_rate(optimizer.param_groups, learning_rate)
                optimizer.step()
            self.num_updates += 1
            self._hand_out()
        self._flat.zero_()
        return norm.item()

    def discard(self) -> None:
        """Drop the gradients of this step; everything else stays as it is."""
        self._flat.zero_()

    def read(self, name: str, key: str | None) -> Tensor:
        """A tensor of the optimizer's state, or with no key the fp32 weights; every process must ask, all get it."""
        local = self._at(name, key) if self._is_mine(name) else None
        if self._owners[name] is None:
            assert local is not None
            return local
        if local is None:
            local = torch.empty(self._shape(name, key), dtype=torch.float32, device=self._flat.device)
        torch.distributed.broadcast(local, group=self._group, group_src=self._owners[name])
        return local

    def write(self, name: str, key: str | None, value: Tensor) -> None:
        """The inverse of `read`, from what every process has; call `written` at the end."""
        if self._is_mine(name):
            self._at(name, key).copy_(value)

    def written(self, num_updates: int) -> None:
        """Take up what was written, after `num_updates` updates."""
        self.num_updates = num_updates
        optimizers.set_count(self._optimizers, num_updates)
        self._hand_out()

    def _is_mine(self, name: str) -> bool:
        return self._owners[name] in (None, self._rank)

    def _at(self, name: str, key: str | None) -> Tensor:
        master = self._masters[name]
        if key is None:
            return master.detach()
        rule = optimizers.rule_of(self._config.optimizer, name, tuple(master.shape))
        tensor: Tensor = self._optimizers[rule].state[master][key]
        return tensor

    def _shape(self, name: str, key: str | None) -> tuple[int, ...]:
        shape = tuple(self._weights[name].shape)
        return shape if key is None else optimizers.state_shapes(self._config.optimizer, name, shape)[key]

    @staticmethod
    def _dealt(model: Model, num_owners: int) -> dict[str, int | None]:
        """The owner of each tensor; None where every process owns all."""
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        return dict(owners_of(sizes, num_owners)) if num_owners > 1 else dict.fromkeys(sizes)

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
        """The norm over all parameters; what every process of a tensor group holds alike counts once."""
        cut = self.module.sharding.cut
        counted = [
            gradient
            for name, gradient in self._gradients.items()
            if parallel.tensor_rank() == 0 or cut(name) is not Cut.REPLICATED
        ]
        norm = get_total_norm(counted)
        if parallel.tensor_size() == 1:
            return norm
        square = norm.square()
        torch.distributed.all_reduce(square, group=parallel.tensor_group())
        return square.sqrt()

    @torch.no_grad()
    def _hand_out(self) -> None:
        """Round the fp32 weights into those of the computation, and give them to the processes that do not own them."""
        on_the_way = []
        for name, weight in self._weights.items():
            if self._is_mine(name) and weight is not self._masters[name]:
                weight.copy_(self._masters[name])
            if (owner := self._owners[name]) is not None:
                on_the_way.append(
                    torch.distributed.broadcast(weight.detach(), group=self._group, group_src=owner, async_op=True)
                )
        for work in on_the_way:
            work.wait()


def _adding_to(gradient: Tensor) -> Callable[[Tensor], None]:
    def add(weight: Tensor) -> None:
        assert weight.grad is not None
        gradient.add_(weight.grad)
        weight.grad = None

    return add
