"""A model in training: gradient accumulation, updates, and the whole training state in and out, by parameter name.

In: a model with fp32 weights. Out: gradients of the mean loss over the global batch, updates of the weights, and the
training state *by parameter name, unsharded, in fp32*, whatever the optimizer, the ZeRO stage and the number of
processes are. So a checkpoint knows nothing of these, and a run resumes with another stage or another number of
processes. `updater` says which of the two implementations serves a run.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from zerokara.config.pretrain_config import TrainingSettings
from zerokara.model.builder import Model
from zerokara.training.compute import devices, optimizers

Accept = Callable[[list[float]], bool]
"""Whether a step with these numbers may change the weights; every rank answers alike."""


class Engine(ABC):
    """Holds the weights of this process (its shard, where tensor parallelism cuts them) and updates them.

    One step is: `accumulate` for each micro batch, `finish_micro_batch` between two of them, then `update`.
    Gradients are accumulated in fp32, and summed in fp32 over the data-parallel ranks; they are never averaged.
    """

    module: torch.nn.Module
    """The model, to be called for evaluation; under ZeRO 3 every process must take part."""
    gradient_factor = 1.0
    """By what `_backward` multiplies the gradient of its loss; the sum over ranks divides by it again."""

    def __init__(self, model: Model, config: TrainingSettings):
        self._config, self._sharding = config, model.sharding
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self._device = devices.local_device()
        self._auxiliary, self._target_len = model.auxiliary, model.shape.target_len
        self._weigh_auxiliary_losses(math.inf)  # none yet; the weight is where the model is

    @property
    @abstractmethod
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
        self._weigh_auxiliary_losses(global_sequences or global_tokens / self._target_len)
        nats: Tensor = self.module(*batch)
        self._backward(nats / global_tokens)
        return nats.detach()

    def _backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of `loss`."""
        loss.backward()

    def finish_micro_batch(self) -> None:  # noqa: B027  # not every engine has something to do
        """End a micro batch that is not the last of its step."""

    def _weigh_auxiliary_losses(self, global_sequences: float) -> None:
        """Beside the mean of the nats over the tokens stands the mean of the attached losses over the sequences."""
        if self._auxiliary:
            self._auxiliary.set_weight(self.gradient_factor / global_sequences, self._device)

    def update(
        self, learning_rate: float, numbers: Tensor | None = None, accept: Accept = lambda numbers: True
    ) -> float:
        """Sum over ranks, clip, update the weights, clear the gradients; return the gradient norm before clipping.

        `numbers` [N] in float64 on the device are read together with the norm, the only time in a step that the host
        waits for the device, and handed to `accept`. If that refuses them, or the norm is not finite, the gradients are
        dropped: weights, moments and counts stay as they are.
        """
        if numbers is None:
            numbers = torch.zeros(0, dtype=torch.float64, device=self._device)
        return self._update(learning_rate, numbers, accept)

    @abstractmethod
    def _update(self, learning_rate: float, numbers: Tensor, accept: Accept) -> float:
        """See `update`."""

    def start_from(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Set all fp32 weights, unsharded, by parameter name and in any order; the optimizer restarts.

        Each tensor is let go before the next is asked for: beside what it trains with, a process holds one.
        """
        written = set()
        for name, whole in weights:
            self._write(name, None, self._sharding.local(name, whole))
            written.add(name)
            del whole
        assert written == self._shapes.keys(), f"no weights for {sorted(self._shapes.keys() - written)}"
        self._take_up_written(num_updates=0)

    def load_state(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], num_updates: int) -> None:
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

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of `weights` and `moments`, by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, local in self._shapes.items():
            whole = tuple(self._sharding.whole_shape(name, torch.Size(local)))
            shapes[name] = whole
            kept = optimizers.state_shapes(self._config.optimizer_name, name, whole)
            shapes |= {f"{name}.{key}": shape for key, shape in kept.items()}
        return shapes

    def _keys(self, name: str) -> list[str]:
        return list(optimizers.state_shapes(self._config.optimizer_name, name, self._shapes[name]))

    def _write_local(self, weights: Mapping[str, Tensor]) -> None:
        """Set the fp32 weights of this process, its shards, if there are any."""
        if weights:
            for name, local in weights.items():
                self._write(name, None, local)
            self._take_up_written(num_updates=0)

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


def take_weights(model: Model, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Take the weights out of `model`, and give it others of `dtype` on `device`, which are undefined.

    On a CPU neither costs memory where nothing was written: the system gives a page when it is first written to.
    """
    taken = {}
    for name, parameter in model.named_parameters():
        taken[name] = parameter.detach()
        parameter.data = torch.empty(parameter.shape, dtype=dtype, device=device)
    return taken
