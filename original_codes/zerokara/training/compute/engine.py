"""The contract of the two engines (`updater` says which serves a run), and the training state in and out by name.

The state is unsharded and in fp32, whatever the optimizer, the ZeRO stage and the number of processes are: a checkpoint
knows nothing of these, and a run resumes with another stage or another number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
    num_updates: int
    """Updates made, those of earlier starts included; skipped steps do not count."""

    def accumulate(self, batch: list[Tensor], global_tokens: float, global_sequences: float | None = None) -> Tensor:
        """Run forward and backward on one micro batch (the model's arguments, with labels); return its summed nats.

        The gradient becomes that of the mean over `global_tokens`, the predicted tokens of the global batch, over all
        processes and micro batches; that of the auxiliary losses, the mean over its `global_sequences` (None: those
        that have so many tokens where every position is predicted).
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


def load_state(
    engine: Engine,
    weights: Iterable[tuple[str, Tensor]],
    optimizer_state: Mapping[str, Tensor] | None = None,
    num_updates: int = 0,
) -> None:
    """Set all fp32 weights, by parameter name in any order, and the optimizer state by ``<parameter>.<key>``.

    All tensors are unsharded; one at a time is in memory. Without its state the optimizer restarts.
    """
    assert optimizer_state or not num_updates, "an optimizer without its state has made no updates"
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
