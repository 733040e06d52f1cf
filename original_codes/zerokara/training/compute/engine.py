"""The contract of the engines, that of a lone process, and the training state in and out by name.

`engine_choice` says which engine serves a run; `zero` holds DeepSpeed's. The state is unsharded and in fp32, whatever
optimizer, ZeRO stage and number of processes are: a checkpoint knows nothing of these, and a run resumes with another
stage or number of processes.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from zerokara.config.pretrain_config import TrainingSettings
from zerokara.model import layers, weight_gradients
from zerokara.model.builder import Model
from zerokara.model.parallel import gathered, local_shard
from zerokara.training.compute import optimizer_rules
from zerokara.training.compute.optimizers import Optimizer, Place

Accept = Callable[[list[float]], bool]
"""Decides whether a step with these numbers may change the weights; every rank decides alike."""
NORM_PIECE = 2**16
"""Numbers whose norm is taken at once on a CPU: there torch's fp32 norm of 2^25 numbers is 0.2 % too small."""


class Engine(Protocol):
    """Holds the weights of this process (its shard, where tensor parallelism cuts them) and updates them.

    One step is: `accumulate` for each micro batch, then `update`. Gradients are summed in fp32, never averaged.
    """

    model: Model
    """The model as built."""
    module: torch.nn.Module
    """The module to call for evaluation; under ZeRO 3 every process must take part."""
    optimizer: Optimizer
    """Has the fp32 master weights and the optimizer state by name, and the number of updates."""

    def accumulate(self, batch: list[Tensor], global_tokens: float, global_sequences: float) -> Tensor:
        """Run forward and backward on one micro batch (the model's arguments, with labels); return its summed nats.

        The gradient becomes that of the mean over `global_tokens`, the predicted tokens of the global batch, over all
        processes and micro batches; of the auxiliary losses, the mean over its `global_sequences`.
        """

    def update(self, learning_rate: float, numbers: Tensor | None = None, accept: Accept = lambda _: True) -> float:
        """Sum over ranks, clip, update the weights, clear the gradients; return the gradient norm before clipping.

        `numbers` [N] in float64 on the device are read with the norm (`read_once`) and handed to `accept`. If that
        rejects them, or the norm is not finite, the step is skipped: weights, optimizer state and counts stay.
        """

    def round_masters(self) -> None:
        """Round the fp32 master weights into those of the computation, after `Optimizer.write`."""


def read_once(norm: Tensor, numbers: Tensor | None) -> tuple[float, list[float]]:
    """Return the gradient norm and `numbers`: the only time in a step that the host waits for the device."""
    together = norm.double().view(1)
    if numbers is not None:  # DeepSpeed's norm is on the CPU where it offloads the gradients
        together = torch.cat([together.to(numbers.device), numbers])
    value, *others = together.tolist()
    return value, others


class LoneEngine:
    """An `Engine` of one process: nothing is sharded, and nothing sent.

    In bf16 the master weights are rounded into those of the computation; in fp32 they are the same tensors.
    """

    def __init__(self, model: Model, config: TrainingSettings, device: torch.device):
        """See `engine_choice.open_engine`."""
        self.model, self._device, self._clipping = model, device, config.gradient_clipping
        self.module: torch.nn.Module = model
        in_bf16 = config.number_format == "bf16"
        dtype = torch.bfloat16 if in_bf16 else torch.float32
        for parameter in model.parameters():  # undefined weights, without a copy of those that it has
            parameter.data = torch.empty(parameter.shape, dtype=dtype, device=device)
        model.to(device, dtype)  # its buffers
        self._masters: dict[str, Tensor] = dict(model.named_parameters())
        self._rounded: list[Tensor] = []
        """The weights of the computation, where they are not the master weights."""
        self._sums: dict[Tensor, Tensor] = {}
        """Gradients that products add up, by master weight."""
        sums, is_several = dict[Tensor, Tensor](), config.global_batch > config.micro_batch
        if config.precision == "bf16" and is_several and weight_gradients.adds_in_fp32(device, dtype):
            sums = layers.sum_gradients_in_products(model)
        if in_bf16:
            for name, weight in model.named_parameters():
                self._masters[name] = master = torch.empty(weight.shape, dtype=torch.float32, device=device)
                self._rounded.append(weight)
                if weight in sums:
                    self._sums[master] = sums[weight]
                else:
                    weight.register_post_accumulate_grad_hook(partial(_add_in_fp32, master))
        self._clear_gradients()
        self.optimizer = Optimizer(config, self._masters, model.shape, device)
        self.optimizer.hold({name: Place(each, 0, (range(each.numel()),)) for name, each in self._masters.items()})

    def accumulate(self, batch: list[Tensor], global_tokens: float, global_sequences: float) -> Tensor:
        if self.model.auxiliary:
            self.model.auxiliary.set_weight(1 / global_sequences, self._device)
        nats: Tensor = self.module(*batch)
        (nats / global_tokens).backward()
        return nats.detach()

    def update(self, learning_rate: float, numbers: Tensor | None = None, accept: Accept = lambda _: True) -> float:
        for master in self._masters.values():
            if master.grad is None:  # it had no part in the loss
                master.grad = torch.zeros_like(master)
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        if self._device.type == "cpu":
            gradients = [piece for gradient in gradients for piece in gradient.flatten().split(NORM_PIECE)]
        norm = get_total_norm(gradients)
        norm_value, values = read_once(norm, numbers)
        if accept(values) and math.isfinite(norm_value):
            if 0 < self._clipping < norm_value:
                clip_grads_with_norm_(list(self._masters.values()), self._clipping, norm)
            self.optimizer.set_learning_rate(learning_rate)
            self.optimizer.step()
            self.optimizer.num_updates += 1
            self.round_masters()
        self._clear_gradients()
        return norm_value

    def _clear_gradients(self) -> None:
        for master in self._masters.values():
            master.grad = self._sums[master].zero_() if master in self._sums else None

    @torch.no_grad()
    def round_masters(self) -> None:
        if self._rounded:
            torch._foreach_copy_(self._rounded, list(self._masters.values()))


def _add_in_fp32(master: Tensor, weight: Tensor) -> None:
    assert weight.grad is not None
    master.grad = weight.grad.float() if master.grad is None else master.grad.add_(weight.grad)
    weight.grad = None


def load_state(
    engine: Engine,
    weights: Iterable[tuple[str, Tensor]],
    optimizer_state: Mapping[str, Tensor] | None = None,
    num_updates: int = 0,
) -> None:
    """Set all fp32 weights, by parameter name in any order, and the optimizer state by ``<parameter>.<key>``.

    All tensors are unsharded; one at a time is in memory. Without its state the optimizer restarts.
    """
    assert optimizer_state or not num_updates, "an optimizer without its state has no updates"
    partition, missing = engine.model.shape.partition, _keys(engine)
    for name, whole in weights:
        engine.optimizer.write(name, None, local_shard(whole, partition(name)))
        del whole
        for key in missing.pop(name):
            if optimizer_state:
                engine.optimizer.write(name, key, local_shard(optimizer_state[f"{name}.{key}"], partition(name)))
    assert not missing, f"no weights for {sorted(missing)}"
    engine.optimizer.set_updates(num_updates)
    engine.round_masters()


def master_weights(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Yield the fp32 master weights by parameter name, unsharded; every process must read them all.

    A tensor may be the training's own, on its device: copy it before asking for the next.
    """
    for name in _keys(engine):
        yield name, gathered(engine.optimizer.read(name, None), engine.model.shape.partition(name))


def optimizer_state(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizer state as ``<parameter>.<key>`` (`optimizer_rules.state_shapes`); as `master_weights`."""
    for name, keys in _keys(engine).items():
        partition = engine.model.shape.partition(name)
        for key in keys:
            yield f"{name}.{key}", gathered(engine.optimizer.read(name, key), partition)


def _keys(engine: Engine) -> dict[str, list[str]]:
    shapes = engine.model.shape.parameter_shapes().items()
    return {name: list(optimizer_rules.state_shapes(engine.optimizer.name, name, shape)) for name, shape in shapes}
