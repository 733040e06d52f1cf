"""What the two engines do alike: their contract, and the training state in and out by parameter name.

The state is unsharded and in fp32, whatever the optimizer, the ZeRO stage and the number of processes are: a checkpoint
knows nothing of these, and a run resumes with another stage or another number of processes. `updater` says which engine
serves a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from zerokara.model.builder import Model
from zerokara.training.compute import optimizers

Accept = Callable[[list[float]], bool]
"""Whether a step with these numbers may change the weights; every rank answers alike."""


class Engine(Protocol):
    """Holds the weights of this process (its shard, where tensor parallelism cuts them) and updates them.

    One step is: `accumulate` for each micro batch, then `update`. Gradients are accumulated in fp32, and summed in fp32
    over the data-parallel ranks; they are never averaged.
    """

    model: Model
    """As built."""
    module: torch.nn.Module
    """What computes, to be called for evaluation; under ZeRO 3 every process must take part."""
    optimizer_name: str

    @property
    def num_updates(self) -> int:
        """Updates made, those of earlier starts included; skipped steps do not count."""

    def accumulate(
        self, batch: Sequence[Tensor], global_tokens: float, global_sequences: float | None = None
    ) -> Tensor:
        """Run forward and backward on one micro batch (the model's arguments, with labels); return its summed nats.

        `global_tokens` is the number of predicted tokens in the global batch, over all processes and micro batches: the
        gradient becomes that of the mean over these tokens. `global_sequences` is the number of sequences in it; None
        where every position of a sequence is predicted.
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


def weigh_auxiliary_losses(
    model: Model, device: torch.device, global_tokens: float, global_sequences: float | None, factor: float = 1.0
) -> None:
    """Add to the mean of the nats over the tokens that of the attached losses over the sequences (`accumulate`).

    `factor` is by what the engine multiplies the gradient of its loss.
    """
    if model.auxiliary:
        model.auxiliary.set_weight(factor / (global_sequences or global_tokens / model.shape.target_len), device)


def read_once(norm: Tensor, numbers: Tensor | None) -> tuple[float, list[float]]:
    """Return the gradient norm and `numbers`: the only time in a step that the host waits for the device."""
    together = norm.double().view(1)
    value, *others = (together if numbers is None else torch.cat([together, numbers])).tolist()
    return value, others


def place(model: Model, dtype: torch.dtype, device: torch.device) -> None:
    """Give `model` undefined weights of `dtype` on `device`, without a copy of those it has."""
    for parameter in model.parameters():
        parameter.data = torch.empty(parameter.shape, dtype=dtype, device=device)


def start_from(engine: Engine, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Set all fp32 weights, unsharded, by parameter name and in any order; the optimizer restarts.

    Streams tensors: peak extra memory is one tensor.
    """
    written = set()
    for name, whole in weights:
        engine.write(name, None, engine.model.sharding.local(name, whole))
        written.add(name)
        del whole
    missing = engine.model.shape.parameter_shapes().keys() - written
    assert not missing, f"no weights for {sorted(missing)}"
    engine.sync_from_master(num_updates=0)


def load_state(
    engine: Engine, weights: Mapping[str, Tensor], optimizer_state: Mapping[str, Tensor], num_updates: int
) -> None:
    """Set the fp32 weights by parameter name, and the optimizer state by ``<parameter>.<key>`` or none of it.

    All tensors are unsharded. Without its state the optimizer restarts, and `num_updates` is 0.
    """
    local = engine.model.sharding.local
    for name, keys in _names_and_keys(engine):
        engine.write(name, None, local(name, weights[name]))
        for key in keys if optimizer_state else ():
            engine.write(name, key, local(name, optimizer_state[f"{name}.{key}"]))
    engine.sync_from_master(num_updates)


def master_weights(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Yield the fp32 master weights by parameter name, unsharded; every process must read them all.

    A tensor may be the training's own, on its device: copy it before asking for the next.
    """
    for name, _ in _names_and_keys(engine):
        yield name, engine.model.sharding.gathered(name, engine.read(name, None))


def optimizer_state(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizer state as ``<parameter>.<key>`` (`optimizers.state_shapes`); as `master_weights`."""
    for name, keys in _names_and_keys(engine):
        for key in keys:
            yield f"{name}.{key}", engine.model.sharding.gathered(name, engine.read(name, key))


def _names_and_keys(engine: Engine) -> list[tuple[str, list[str]]]:
    shapes = engine.model.shape.parameter_shapes()
    return [(name, list(optimizers.state_shapes(engine.optimizer_name, name, shapes[name]))) for name in shapes]
