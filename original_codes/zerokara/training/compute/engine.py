"""A model in training: gradient accumulation, updates, and the whole training state in and out, by parameter name.

In: a model with fp32 weights. Out: gradients of the mean loss over the global batch, updates of the weights, and the
training state *by parameter name, unsharded, in fp32*, whatever the optimizer, the ZeRO stage and the number of
processes are. So a checkpoint knows nothing of these, and a run resumes with another stage or another number of
processes. `updater` says which of the two implementations serves a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zerokara.config.training_settings import TrainingSettings
from zerokara.model.builder import Model
from zerokara.training.compute import optimizers


class Engine(ABC):
    """Holds the weights of this process (its shard, where tensor parallelism cuts them) and updates them.

    One step is: `accumulate` for each micro batch, `finish_micro_batch` between two of them, then `update` or
    `discard`. Gradients are accumulated in fp32 and summed over the data-parallel ranks; they are never averaged.
    """

    module: torch.nn.Module
    """The model, to be called for evaluation; under ZeRO 3 every process must take part."""

    def __init__(self, model: Model, config: TrainingSettings):
        self._config, self._sharding = config, model.sharding
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    @property
    @abstractmethod
    def num_updates(self) -> int:
        """Updates made, those of earlier starts included; skipped steps do not count."""

    def accumulate(self, batch: Sequence[Tensor], global_tokens: float) -> Tensor:
        """Run forward and backward on one micro batch (the model's arguments, with labels); return its summed nats.

        `global_tokens` is the number of predicted tokens in the global batch, over all processes and micro batches: the
        gradient becomes that of the mean over these tokens.
        """
        nats: Tensor = self.module(*batch)
        self._backward(nats / global_tokens)
        return nats.detach()

    def _backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of `loss`."""
        loss.backward()

    def finish_micro_batch(self) -> None:  # noqa: B027  # not every engine has something to do
        """End a micro batch that is not the last of its step."""

    @abstractmethod
    def update(self, learning_rate: float) -> float:
        """Sum over ranks, clip, update the weights, clear the gradients; return the gradient norm before clipping.

        If the norm is not finite nothing is changed, as by `discard`.
        """

    @abstractmethod
    def discard(self) -> None:
        """Skip this step's update: drop its gradients; weights, moments and counts stay as they are."""

    def load_state(self, weights: dict[str, Tensor], moments: dict[str, Tensor], num_updates: int) -> None:
        """Set the fp32 weights by parameter name, and the optimizer state by ``<parameter>.<key>`` or none of it.

        All tensors are unsharded. Without its state the optimizer restarts, and `num_updates` is 0.
        """
        assert moments or not num_updates, "an optimizer without its state has made no updates"
        for name in self._shapes:
            self._write(name, None, self._sharding.local(name, weights[name]))
            for key in self._keys(name) if moments else ():
                self._write(name, key, self._sharding.local(name, moments[f"{name}.{key}"]))
        self._take_up_written(num_updates)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the fp32 master weights by parameter name, unsharded; every process must read them all.

        A tensor may be the training's own, on its device: copy it before asking for the next.
        """
        for name in self._shapes:
            yield name, self._sharding.gathered(name, self._read(name, None))

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer state as ``<parameter>.<key>`` (`optimizers.state_shapes`); as `weights`."""
        for name in self._shapes:
            for key in self._keys(name):
                yield f"{name}.{key}", self._sharding.gathered(name, self._read(name, key))

    def _keys(self, name: str) -> list[str]:
        return list(optimizers.state_shapes(self._config.optimizer, name, self._shapes[name]))

    @abstractmethod
    def _read(self, name: str, key: str | None) -> Tensor:
        """Return the optimizer state `key` of a parameter, or with None its fp32 master weights.

        Every process must ask, and every process gets it. It may be the training's own tensor: copy it to keep it.
        """

    @abstractmethod
    def _write(self, name: str, key: str | None, value: Tensor) -> None:
        """Set what `_read` returns, from a value that every process has; call `_take_up_written` at the end."""

    @abstractmethod
    def _take_up_written(self, num_updates: int) -> None:
        """Take up what was written, as the state after `num_updates` updates."""
