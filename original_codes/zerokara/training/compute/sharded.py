"""AdamW under ZeRO 1 to 3 by torch's FSDP2 (`fully_shard`, torch 2.13): weights, gradients and state sharded.

Each parameter is cut along its first dimension over the data-parallel ranks, as `Tensor.chunk` cuts: the last ranks may
hold less, or none. The fp32 shard is the master weights. Hooks around a layer, and around all that is in no layer, then

- gather its weights, rounded to the precision of the computation: at stages 1 and 2 once a step, in the first micro
  batch; at stage 3 before each forward and each backward pass of the layer;
- reduce-scatter its gradients, summed in fp32, when its backward pass is done: at stage 1 once a step, in the last
  micro batch; at stages 2 and 3 in each, added to those of the micro batches before.

Between the hooks a layer has whole weights and communicates nothing, so that torch.compile takes it as one graph.
Source: torch/distributed/fsdp/_fully_shard; PyTorch FSDP (Zhao et al., 2023, arXiv 2304.11277).
"""

from __future__ import annotations

import math
import warnings

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from zerokara.config.pretrain_config import TrainingSettings
from zerokara.model import parallel
from zerokara.model.builder import Model
from zerokara.training.compute import torch_optimizers
from zerokara.training.compute.engine import Accept, clip_and_step, gradient_norm, is_trained, read_once

# Of T5, whose decoder layers hand on the encoder's output, which nothing changes in place.
warnings.filterwarnings("ignore", category=UserWarning, message="FSDP2-wrapped module .* returned a view tensor")


class ShardedEngine:
    """An `engine.Engine`: AdamW under ZeRO 1 to 3, without offload."""

    trains_all = True

    def __init__(self, model: Model, config: TrainingSettings, device: torch.device):
        """See `updater.open_engine`."""
        self.model, self._device, self._clipping = model, device, config.gradient_clipping
        self.module: torch.nn.Module = model
        self.optimizer_name: str = config.optimizer_name
        self._mesh, self._stage = DeviceMesh.from_group(parallel.data_group(), device.type), config.zero_stage
        for parameter in model.parameters():  # undefined weights, without a copy of those that it has
            parameter.data = torch.empty(parameter.shape, dtype=torch.float32)
        dtype = torch.bfloat16 if config.number_format == "bf16" else torch.float32
        policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in model.all_layers():
            fully_shard(layer, mesh=self._mesh, mp_policy=policy, reshard_after_forward=self._stage == 3)
        self._hooks = fully_shard(model, mesh=self._mesh, mp_policy=policy, reshard_after_forward=False)
        self._hooked = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for hooked in self._hooked:
            hooked.set_gradient_divide_factor(1.0)  # summed, not averaged
            hooked.set_force_sum_reduction_for_comms(True)  # gloo knows no other sum with a factor
        if model.auxiliary:
            model.auxiliary.set_weight(0.0, device)  # the compiler looks at where the weight is
        self._micro_batches, self._computed = config.global_batch // (config.micro_batch * parallel.data_size()), 0
        self._parameters = dict(model.named_parameters())
        self._masters = {name: each.to_local().detach() for name, each in self._parameters.items()}
        made = torch_optimizers.build(config, self._masters, model.shape)
        torch_optimizers.make_state(config.optimizer_name, made, self._masters)
        self._adam = made["adamw"]
        self._local = {name: {None: each, **self._adam.state[each]} for name, each in self._masters.items()}

    def accumulate(self, batch: list[Tensor], global_tokens: float, global_sequences: float) -> Tensor:
        if self.model.auxiliary:
            self.model.auxiliary.set_weight(1 / global_sequences, self._device)
        self._computed += 1
        is_last = self._computed == self._micro_batches
        self._hooks.set_reshard_after_backward(is_last or self._stage == 3)
        self._hooks.set_requires_gradient_sync(is_last or self._stage > 1)
        nats: Tensor = self.module(*batch)
        (nats / global_tokens).backward()
        return nats.detach()

    def update(self, learning_rate: float, numbers: Tensor | None = None, accept: Accept = lambda _: True) -> float:
        self._computed = 0
        for name, master in self._masters.items():
            gradient, self._parameters[name].grad = self._parameters[name].grad.to_local(), None
            master.grad = gradient if is_trained(self, name) else None
        gradients = {name: master.grad for name, master in self._masters.items() if master.grad is not None}
        norm = gradient_norm(self.model, gradients, [parallel.data_group()], self._device)
        norm_value, values = read_once(norm, numbers)
        if accept(values) and math.isfinite(norm_value):
            limit = self._clipping if norm_value > self._clipping else 0.0
            clip_and_step([self._adam], self._masters.values(), learning_rate, norm, limit)
            self.num_updates += 1
        self._adam.zero_grad()
        return norm_value

    def read(self, name: str, key: str | None) -> Tensor:
        whole, local = self._parameters[name], self._local[name][key]
        shape, stride = whole.shape, whole.stride()
        return DTensor.from_local(local, self._mesh, [Shard(0)], shape=shape, stride=stride).full_tensor()

    def write(self, name: str, key: str | None, value: Tensor) -> None:
        local = self._local[name][key]
        if len(local):
            local.copy_(value.chunk(parallel.data_size())[parallel.data_rank()])

    def sync_from_master(self, num_updates: int) -> None:
        """Let the next forward pass gather what was written."""
        self.num_updates = num_updates
        for state in self._adam.state.values():
            state["step"].fill_(num_updates)
        for hooked in self._hooked:
            hooked.reshard()
