"""A model in training: gradient accumulation, updates, and the whole training state in and out, by parameter name.

In: a model with fp32 weights, and an updater (`updater`: the contract and its two implementations). Out: gradients of
the mean loss over the global batch, updates of the weights, and the training state *by parameter name, unsharded, in
fp32*, whatever the optimizer, the ZeRO stage and the number of processes are. So a checkpoint knows nothing of these,
and a run resumes with another stage or another number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zerokara.config.training_settings import TrainingSettings
from zerokara.model.builder import Model
from zerokara.training.compute import optimizers
from zerokara.training.compute.replicated_updater import ReplicatedUpdater
from zerokara.training.compute.updater import Accept, Updater, UpdaterName


class Engine:
    """A model and what updates it."""

    def __init__(self, model: Model, updater: Updater, optimizer: str):
        """Wrap a model that `updater` has taken over; `optimizer` is the setting, which names the state's keys."""
        self._updater, self._optimizer, self._sharding = updater, optimizer, model.sharding
        self._auxiliary, self._target_len = model.auxiliary, model.shape.target_len
        self._weigh_auxiliary_losses(math.inf)  # none yet; the weight is where the model is
        # ZeRO 3 empties a parameter at rest, and remembers its shape.
        self._shapes = {
            name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in model.named_parameters()
        }

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped model, to be called for evaluation; under ZeRO 3 every process must take part."""
        return self._updater.module

    @property
    def num_updates(self) -> int:
        """Updates made, those of earlier starts included; skipped steps do not count."""
        return self._updater.num_updates

    def accumulate(self, batch: Sequence[Tensor], global_tokens: float) -> Tensor:
        """Run forward and backward on one micro batch (the model's arguments, with labels); return its summed nats.

        `global_tokens` is the number of predicted tokens in the global batch, over all processes and micro batches: the
        gradient becomes that of the mean over these tokens.
        """
        self._weigh_auxiliary_losses(global_tokens)
        nats: Tensor = self._updater.module(*batch)
        self._updater.backward(nats / global_tokens)
        return nats.detach()

    def finish_micro_batch(self) -> None:
        """End a micro batch that is not the last of its step."""
        self._updater.finish_micro_batch()

    def update(
        self, learning_rate: float, numbers: Tensor | None = None, accept: Accept = lambda numbers: True
    ) -> float:
        """Clip, update the weights, clear the gradients; return the gradient norm before clipping.

        `numbers` [N] in float64 on the device are read together with the norm, and handed to `accept`. If that refuses
        them, or the norm is not finite, the update is skipped: weights, moments and counts stay as they are.
        """
        if numbers is None:
            numbers = torch.zeros(0, dtype=torch.float64, device=self._updater.device)
        return self._updater.update(learning_rate, numbers, accept)

    def load_state(self, weights: dict[str, Tensor], moments: dict[str, Tensor], num_updates: int) -> None:
        """Set the fp32 weights by parameter name, and the optimizer state by ``<parameter>.<key>`` or none of it.

        All tensors are unsharded. Without its state the optimizer restarts, and `num_updates` is 0.
        """
        assert moments or not num_updates, "an optimizer without its state has made no updates"
        for name in self._shapes:
            self._updater.write(name, None, self._sharding.local(name, weights[name]))
            for key in self._keys(name) if moments else ():
                self._updater.write(name, key, self._sharding.local(name, moments[f"{name}.{key}"]))
        self._updater.written(num_updates)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the fp32 master weights by parameter name, unsharded; every process must read them all.

        A tensor may be the training's own, on its device: copy it before asking for the next.
        """
        for name in self._shapes:
            yield name, self._sharding.gathered(name, self._updater.read(name, None))

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer state as ``<parameter>.<key>`` (`optimizers.state_shapes`); as `weights`."""
        for name in self._shapes:
            for key in self._keys(name):
                yield f"{name}.{key}", self._sharding.gathered(name, self._updater.read(name, key))

    def _weigh_auxiliary_losses(self, global_tokens: float) -> None:
        """Beside the mean of the nats over the tokens stands the mean of the attached losses over the sequences."""
        if self._auxiliary:
            weight = self._updater.gradient_factor * self._target_len / global_tokens
            self._auxiliary.set_weight(weight, self._updater.device)

    def _keys(self, name: str) -> list[str]:
        return list(optimizers.state_shapes(self._optimizer, name, self._shapes[name]))


def open_engine(
    model: Model, config: TrainingSettings, updater: UpdaterName, data_parallel_size: int, template: dict[str, Any]
) -> Engine:
    """Hand `model`, whose weights must be fp32, to an updater; its weights become the master weights unrounded."""
    chosen: Updater
    if updater == "zero":
        from zerokara.training.compute.zero_updater import ZeroUpdater  # DeepSpeed takes seconds to import

        chosen = ZeroUpdater(model, config, data_parallel_size, template)
    else:
        chosen = ReplicatedUpdater(model, config)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    assert all(parameter.dtype == dtype for parameter in model.parameters()), f"weights are not {dtype}"
    return Engine(model, chosen, config.optimizer)
