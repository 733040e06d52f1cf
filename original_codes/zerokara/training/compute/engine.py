"""The contract of the engines, the replicated one, and the training state in and out by name.

`updater` says which engine serves a run; `sharded` and `zero` hold the others. The state is unsharded and in fp32,
whatever optimizer, ZeRO stage and number of processes are: a checkpoint knows nothing of these, and a run resumes with
another stage or number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from zerokara.config.pretrain_config import TrainingSettings
from zerokara.model import parallel
from zerokara.model.builder import Model
from zerokara.model.initial_weights import VOCABULARY
from zerokara.training.compute import optimizers, torch_optimizers
from zerokara.training.compute.buckets import CHUNK, GradientBuckets, views

Accept = Callable[[list[float]], bool]
"""Decides whether a step with these numbers may change the weights; every rank decides alike."""


class Engine(Protocol):
    """Holds the weights of this process (its shard, where tensor parallelism cuts them) and updates them.

    One step is: `accumulate` for each micro batch, then `update`. Gradients are summed in fp32, never averaged.
    """

    model: Model
    """The model as built."""
    module: torch.nn.Module
    """The module to call for evaluation; under ZeRO 3 every process must take part."""
    optimizer_name: str
    num_updates: int
    """Updates so far, those of earlier starts included; skipped steps do not count."""
    trains_all: bool
    """False while the embeddings alone are trained (`is_trained`); not DeepSpeed's."""

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

    def read(self, name: str, key: str | None) -> Tensor:
        """Return the optimizer state `key` of a parameter, or with None its fp32 master weights.

        Every process must ask, and every process gets it. It may be the training's own tensor: copy it to keep it.
        """

    def write(self, name: str, key: str | None, value: Tensor) -> None:
        """Set what `read` returns, from a value that every process has; call `sync_from_master` at the end."""

    def sync_from_master(self, num_updates: int) -> None:
        """Copy the master weights to those of the computation; set the number of updates."""


def read_once(norm: Tensor, numbers: Tensor | None) -> tuple[float, list[float]]:
    """Return the gradient norm and `numbers`: the only time in a step that the host waits for the device."""
    together = norm.double().view(1)
    value, *others = (together if numbers is None else torch.cat([together, numbers])).tolist()
    return value, others


def is_trained(engine: Engine, name: str) -> bool:
    """True if an update changes the parameter."""
    return engine.trains_all or name.endswith(VOCABULARY)


def gradient_norm(
    model: Model, gradients: Mapping[str, Tensor], cut_over: Sequence[ProcessGroup], device: torch.device
) -> Tensor:
    """Return the norm of the summed gradients of `model`, of which the ranks of each group `cut_over` hold parts."""
    # What tensor-parallel ranks replicate counts once.
    counts_all, is_replicated = parallel.tensor_rank() == 0, model.sharding.is_replicated
    norm = get_total_norm([part for name, part in gradients.items() if counts_all or not is_replicated(name)])
    for ranks in [*cut_over, *[parallel.tensor_group()] * (parallel.tensor_size() > 1)]:
        square = norm.to(device).square()
        torch.distributed.all_reduce(square, group=ranks)
        norm = square.sqrt()
    return norm


def clip_and_step(
    made: Iterable[torch.optim.Optimizer], weights: Iterable[Tensor], learning_rate: float, norm: Tensor, limit: float
) -> None:
    """Update `weights` from their gradients, scaled from their `norm` on the device down to `limit`; 0 leaves them.

    A weight without a gradient stays as it is.
    """
    if limit:
        clip_grads_with_norm_(list(weights), limit, norm)
    for optimizer in made:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_scale"]
        optimizer.step()
        for weight, state in optimizer.state.items():
            if weight.grad is None and "step" in state:
                state["step"] += 1  # the count of all updates, as a start that resumes sets it


class ReplicatedEngine:
    """Replicated data parallelism: ZeRO stage 0, and stage 1 of a lone rank or of optimizers that need whole matrices.

    Every rank updates the tensors that it owns. At stage 0 every rank owns all of them. At stage 1 each tensor has one
    owner, to which the gradients are sent (`GradientBuckets`), which alone keeps its fp32 master weights and its
    optimizer state, and broadcasts the updated weights, all in one. In bf16 the master weights are rounded into those
    of the computation; in fp32 they are the same tensors.
    """

    trains_all = True

    def __init__(self, model: Model, config: TrainingSettings, device: torch.device):
        """See `updater.open_engine`."""
        self.model, self._device, self._clipping = model, device, config.gradient_clipping
        self.module: torch.nn.Module = model
        self.optimizer_name: str = config.optimizer_name
        in_bf16 = config.number_format == "bf16"
        dtype = torch.bfloat16 if in_bf16 else torch.float32
        for parameter in model.parameters():  # undefined weights, without a copy of those that it has
            parameter.data = torch.empty(parameter.shape, dtype=dtype, device=device)
        model.to(device, dtype)  # its buffers
        if model.auxiliary:
            model.auxiliary.set_weight(0.0, device)  # the compiler looks at where the weight is
        self._weights, ranks = dict(model.named_parameters()), parallel.data_size()
        sizes = {name: weight.numel() for name, weight in self._weights.items()}
        self._shards = bool(config.zero_stage) and ranks > 1
        costs = optimizers.update_costs(config.optimizer_name, model.shape, sizes)
        self._owners = optimizers.owners_of(costs, ranks) if self._shards else dict.fromkeys(sizes)
        """The rank that owns each tensor; None where every rank owns all."""
        self._sent: list[tuple[int, Tensor]] = []
        """Owners, and the weights of each, one after another."""
        for owner in sorted({*self._owners.values()} - {None}):
            owned = [self._weights[name] for name in sizes if self._owners[name] == owner]
            flat, parts = views(owned, dtype)
            self._sent += [(owner, piece) for piece in flat.split(CHUNK)]
            for weight, part in zip(owned, parts, strict=True):
                weight.data = part
        self._masters = {
            name: torch.empty(weight.shape, dtype=torch.float32, device=device) if in_bf16 else weight
            for name, weight in self._weights.items()
            if self._owners[name] in (None, parallel.data_rank())
        }
        self._gradients = GradientBuckets(self._weights, self._owners, parallel.data_group())
        self._micro_batches, self._computed = 1, 0
        if ranks > 1:  # a lone rank sends nothing, and does not ask which is the last one
            self._micro_batches = config.global_batch // (config.micro_batch * ranks)
        self._optimizers = torch_optimizers.build(config, self._masters, model.shape)
        torch_optimizers.make_state(config.optimizer_name, self._optimizers, self._masters)
        states = {tensor: state for each in self._optimizers.values() for tensor, state in each.state.items()}
        self._local = {name: {None: master.detach(), **states[master]} for name, master in self._masters.items()}

    def accumulate(self, batch: list[Tensor], global_tokens: float, global_sequences: float) -> Tensor:
        if self.model.auxiliary:
            self.model.auxiliary.set_weight(1 / global_sequences, self._device)
        nats: Tensor = self.module(*batch)
        self._gradients.begin(is_first=not self._computed, is_last=self._computed + 1 == self._micro_batches)
        (nats / global_tokens).backward()
        self._gradients.end()
        self._computed += 1
        return nats.detach()

    def update(self, learning_rate: float, numbers: Tensor | None = None, accept: Accept = lambda _: True) -> float:
        self._gradients.wait()
        self._computed = 0
        own = {name: self._gradients.parts[name] for name in self._masters if is_trained(self, name)}
        norm = gradient_norm(self.model, own, [parallel.data_group()] * self._shards, self._device)
        norm_value, values = read_once(norm, numbers)
        if accept(values) and math.isfinite(norm_value):
            for name, master in self._masters.items():
                master.grad = own.get(name)
            limit = self._clipping if norm_value > self._clipping else 0.0
            clip_and_step(self._optimizers.values(), self._masters.values(), learning_rate, norm, limit)
            for master in self._masters.values():
                master.grad = None  # in fp32 the next backward pass would add to it
            self.num_updates += 1
            self._round_and_broadcast()
        return norm_value

    def read(self, name: str, key: str | None) -> Tensor:
        if name in self._local:
            local = self._local[name][key]
        else:
            shape = tuple(self._weights[name].shape)
            shape = optimizers.state_shapes(self.optimizer_name, name, shape)[key] if key else shape
            local = torch.empty(shape, dtype=torch.float32, device=self._device)
        if (owner := self._owners[name]) is not None:
            torch.distributed.broadcast(local, group=parallel.data_group(), group_src=owner)
        return local

    def write(self, name: str, key: str | None, value: Tensor) -> None:
        if name in self._local:
            self._local[name][key].copy_(value)

    def sync_from_master(self, num_updates: int) -> None:
        self.num_updates = num_updates
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["num_updates"] = num_updates
            for state in optimizer.state.values():
                if "step" in state:
                    state["step"].fill_(num_updates)
        self._round_and_broadcast()

    @torch.no_grad()
    def _round_and_broadcast(self) -> None:
        """Round the master weights into those of the computation, and broadcast them from their owners."""
        rounded = [name for name, master in self._masters.items() if self._weights[name] is not master]
        if rounded:
            torch._foreach_copy_([self._weights[name] for name in rounded], [self._masters[name] for name in rounded])
        group = parallel.data_group()
        broadcasts = [
            torch.distributed.broadcast(piece, group=group, group_src=owner, async_op=True)
            for owner, piece in self._sent
        ]
        for work in broadcasts:
            work.wait()


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
    local, missing = engine.model.sharding.local, _keys(engine)
    for name, whole in weights:
        engine.write(name, None, local(name, whole))
        del whole
        for key in missing.pop(name):
            if optimizer_state:
                engine.write(name, key, local(name, optimizer_state[f"{name}.{key}"]))
    assert not missing, f"no weights for {sorted(missing)}"
    engine.sync_from_master(num_updates)


def master_weights(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Yield the fp32 master weights by parameter name, unsharded; every process must read them all.

    A tensor may be the training's own, on its device: copy it before asking for the next.
    """
    for name in _keys(engine):
        yield name, engine.model.sharding.gathered(name, engine.read(name, None))


def optimizer_state(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizer state as ``<parameter>.<key>`` (`optimizers.state_shapes`); as `master_weights`."""
    for name, keys in _keys(engine).items():
        for key in keys:
            yield f"{name}.{key}", engine.model.sharding.gathered(name, engine.read(name, key))


def _keys(engine: Engine) -> dict[str, list[str]]:
    shapes = engine.model.shape.parameter_shapes().items()
    return {name: list(optimizers.state_shapes(engine.optimizer_name, name, shape)) for name, shape in shapes}
