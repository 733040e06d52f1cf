"""Training a model: gradients added up, clipped, turned into updates; and the whole state, in and out, by name.

What comes in: a model with fp32 weights, and settings. What goes out: an engine that accumulates gradients, updates the
weights with a given learning rate, and hands out and takes in the training state *by parameter name, whole, in fp32*,
whatever the optimizer, the ZeRO stage and the number of processes are. So a checkpoint knows nothing of these, and
another stage or another number of processes goes on from it.

The work is done by one of two updaters (`optimizers.by_whole_tensors`): `whole_tensors.WholeTensors` for ZeRO stage 0,
stage 1 of a lone process, Adafactor and Muon; or else `Partitions`, DeepSpeed's ZeRO (0.19.8). This file is the only
one that names deepspeed.

Source of the state access: deepspeed/utils/tensor_fragment.py (`safe_get_full_fp32_param` and its family).
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import parallel
from zerokara.model.megatron import Model
from zerokara.training.compute import optimizers
from zerokara.training.compute.deepspeed_settings import settings_for
from zerokara.training.compute.whole_tensors import WholeTensors


def init_distributed(device_type: str, init_method: str | None = None) -> None:
    """Join the processes that the launcher started (RANK, WORLD_SIZE, LOCAL_RANK), where `init_method` says.

    Without it, at MASTER_ADDR and MASTER_PORT, as torchrun has it. The only process of a run meets nobody.
    """
    deepspeed.logger.setLevel(logging.ERROR)
    # torch 2.13 renames collectives that DeepSpeed 0.19.8 still calls by their old names; nobody here can act on it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # deepspeed/comm/torch.py, build_shm_op: on a CPU with a compiler it would build a C++ operator while the run waits.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "nccl" if device_type == "cuda" else "gloo"
    if not torch.distributed.is_initialized() and os.environ.get("WORLD_SIZE") == "1":
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    place: dict[str, Any] = {}
    if init_method:
        place = {
            "init_method": init_method,
            "rank": int(os.environ["RANK"]),
            "world_size": int(os.environ["WORLD_SIZE"]),
        }
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False, **place)


class Updater(Protocol):
    """What holds the weights of this process (its part, where tensor parallelism cuts them) and updates them."""

    @property
    def module(self) -> torch.nn.Module:
        """The model, to be called; every process must take part under ZeRO 3."""

    @property
    def num_updates(self) -> int:
        """Updates made, those of earlier starts included; steps that were left out do not count."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`; what counts is its sum over micro batches and processes."""

    def finish_micro_batch(self) -> None:
        """A micro batch is over which is not the last of its step."""

    def update(self, learning_rate: float) -> float:
        """Clip, update, clear; gives the norm before clipping. A norm that is not finite changes nothing."""

    def discard(self) -> None:
        """Drop the gradients of this step; everything else stays as it is."""

    def read(self, name: str, key: str | None) -> Tensor:
        """A tensor of the optimizer's state of a parameter, or with no key its fp32 weights; every process must ask."""

    def write(self, name: str, key: str | None, value: Tensor) -> None:
        """The inverse of `read`, from what every process has; call `written` at the end."""

    def written(self, num_updates: int) -> None:
        """Take up what was written, after `num_updates` updates."""


class Engine:
    """A model in training."""

    def __init__(self, model: Model, config: PretrainConfig, num_processes: int, template: dict[str, Any]):
        """Wrap `model`, whose weights must be fp32: they become the optimizer's weights unrounded.

        `num_processes` counts those that share out the data (`parallel.data_size`).
        """
        self._optimizer, self._sharding = config.optimizer, model.sharding
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._updater: Updater
        if optimizers.by_whole_tensors(config, num_processes):
            self._updater = WholeTensors(model, config)
        else:
            self._updater = Partitions(model, config, num_processes, template)
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        assert all(parameter.dtype == dtype for parameter in model.parameters()), f"weights are not {dtype}"

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped model, to be called for evaluation (every process must take part under ZeRO 3)."""
        return self._updater.module

    @property
    def num_updates(self) -> int:
        """Updates made, those of earlier starts included; steps that were left out do not count."""
        return self._updater.num_updates

    def accumulate(self, batch: Sequence[Tensor], global_tokens: float) -> Tensor:
        """Forward and backward of one micro batch (the model's arguments, with labels); gives its summed nats.

        `global_tokens` is the count of predicted tokens in the global batch, over all processes and micro batches:
        the gradient becomes that of the mean over these tokens.
        """
        nats: Tensor = self._updater.module(*batch)
        self._updater.backward(nats / global_tokens)
        return nats.detach()

    def finish_micro_batch(self) -> None:
        """Say that a micro batch is over which is not the last of its step."""
        self._updater.finish_micro_batch()

    def update(self, learning_rate: float) -> float:
        """Clip, update the weights, clear the gradients; gives the gradient's norm before clipping.

        Where the norm is not finite, nothing is changed, as by `discard`.
        """
        return self._updater.update(learning_rate)

    def discard(self) -> None:
        """Leave this step's update out: drop its gradients; weights, running means and counts stay as they are."""
        self._updater.discard()

    def load_state(self, weights: dict[str, Tensor], moments: dict[str, Tensor], num_updates: int) -> None:
        """Take in fp32 weights by parameter name, and the optimizer's state by ``<parameter>.<key>`` or none of it.

        All of them are whole, however the parameters are cut among the processes. Without its state the optimizer
        starts anew; `num_updates` is then 0.
        """
        assert moments or not num_updates, "an optimizer without its state has made no updates"
        for name in self._shapes:
            self._updater.write(name, None, self._sharding.local(name, weights[name]))
            for key in self._keys(name) if moments else ():
                self._updater.write(name, key, self._sharding.local(name, moments[f"{name}.{key}"]))
        self._updater.written(num_updates)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The fp32 weights by parameter name, whole, one after another; every process must read them all.

        A tensor may be the training's own, on its device: whoever keeps it copies it before asking for the next.
        """
        for name in self._shapes:
            yield name, self._sharding.gathered(name, self._updater.read(name, None))

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """The optimizer's state as ``<parameter>.<key>`` (`optimizers.state_shapes`), as `weights`."""
        for name in self._shapes:
            for key in self._keys(name):
                yield f"{name}.{key}", self._sharding.gathered(name, self._updater.read(name, key))

    def _keys(self, name: str) -> list[str]:
        return list(optimizers.state_shapes(self._optimizer, name, tuple(self._shapes[name])))


class Partitions:
    """An `Updater`: AdamW under DeepSpeed's ZeRO, stages 1 to 3."""

    def __init__(self, model: Model, config: PretrainConfig, num_processes: int, template: dict[str, Any]):
        """Take over `model`, whose weights must be fp32."""
        # DeepSpeed divides by the number of micro batches and averages over the processes; this undoes both.
        self._times = num_processes * (config.global_batch_size // (config.micro_batch * num_processes))
        initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        made = optimizers.build(config, dict(model.named_parameters()), model.shape)
        self._adam = made["adamw"]
        # runtime/bf16_optimizer.py narrates its memory on stdout whatever the log level is.
        with contextlib.redirect_stdout(io.StringIO()):
            self._deepspeed, self._wrapper, _, _ = deepspeed.initialize(
                model=model,
                optimizer=self._adam,
                config=settings_for(config, num_processes, template),
                dist_init_required=False,
                mpu=parallel.ModelParallelUnit() if parallel.tensor_size() > 1 else None,
            )
        self.module = self._deepspeed
        self._parameters = dict(model.named_parameters())
        self._masters = {str(number): master for number, master in enumerate(self._find_masters())}
        self._check_precision(config)
        # AdamW would make its state in the first update, too late to load one.
        optimizers.make_state(config.optimizer, made, self._masters)
        if hasattr(self._wrapper, "_lazy_init_hp_params_optimizer_state"):
            self._wrapper._lazy_init_hp_params_optimizer_state()
        # DeepSpeed makes its fp32 weights from the rounded ones; give back what rounding took.
        for name, weight in initial.items():
            self.write(name, None, weight)
        self.written(num_updates=0)

    @property
    def num_updates(self) -> int:
        """Updates made, by AdamW's own count."""
        return int(next(iter(self._adam.state.values()))["step"])

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`; what counts is its sum over micro batches and processes."""
        self._deepspeed.backward(loss * self._times)

    def finish_micro_batch(self) -> None:
        """Tell DeepSpeed that a micro batch is over which is not the last of its step."""
        self._deepspeed.step()

    def update(self, learning_rate: float) -> float:
        """Clip, update, clear; gives the norm before clipping. DeepSpeed leaves out a step whose norm is not finite."""
        optimizers.set_learning_rate(self._deepspeed.optimizer.param_groups, learning_rate)
        self._deepspeed.step()
        norm = float(self._deepspeed.get_global_grad_norm())
        if not math.isfinite(norm):
            self._gather_persistent()
        return norm

    def discard(self) -> None:
        """Drop the gradients of this step; everything else stays as it is."""
        # Each wrapper drops a step whose norm is invalid, in all processes alike; so it is told that this one's is.
        invalid = torch.tensor(math.inf)
        answers: dict[str, Any] = {
            "_get_norm_groups": [invalid],  # stage 3: runtime/zero/stage3.py
            "scaled_global_norm": invalid,  # stages 1 and 2: runtime/zero/stage_1_and_2.py
            "get_grads_for_norm": ([invalid], {}),  # stage 1 in bf16 with fp32 gradients: runtime/bf16_optimizer.py
        }
        method = next(name for name in answers if hasattr(self._wrapper, name))
        setattr(self._wrapper, method, lambda *_, **__: answers[method])
        try:
            self._deepspeed.step()
        finally:
            delattr(self._wrapper, method)
        self._gather_persistent()

    def read(self, name: str, key: str | None) -> Tensor:
        """A running mean of a parameter, or with no key its fp32 weights; every process must ask, all get it."""
        parameter = self._parameters[name]
        found = safe_get_full_optimizer_state(parameter, key) if key else safe_get_full_fp32_param(parameter)
        assert found is not None, f"{name}: DeepSpeed gives no {key or 'weights'}"
        # Under ZeRO 3 a parameter at rest is empty and remembers its shape.
        return found.detach().view(getattr(parameter, "ds_shape", parameter.shape)).to(torch.float32)

    def write(self, name: str, key: str | None, value: Tensor) -> None:
        """The inverse of `read`, from what every process has; call `written` at the end."""
        parameter, value = self._parameters[name], value.to(self._deepspeed.device)
        if self._is_stage_3:
            # stage3.py, set_full_hp_param, asks the last process for more than there is where the pieces are no equal
            # ones: a norm of 256 among three processes.
            piece, _ = self._wrapper._get_fp32_opt_state_partition(parameter, False, optim_state_key=key)
            begin = piece.numel() * self._wrapper._get_param_partition_rank(parameter)
            mine = value.flatten()[begin : begin + piece.numel()]
            piece.data[: mine.numel()].copy_(mine)
        elif key is None:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, key)

    def written(self, num_updates: int) -> None:
        """Take up what was written, after `num_updates` updates: DeepSpeed computes with a copy of the fp32 weights."""
        optimizers.set_count({"adamw": self._adam}, num_updates)
        if not self._is_stage_3:
            self._wrapper.update_lp_params()
            return
        # What the end of `step` does in stage3.py, which has no name for it.
        self._wrapper._partition_all_parameters()
        for group in range(len(self._masters)):
            self._wrapper._reassign_or_swap_out_partitioned_parameters(group)
        self._gather_persistent()

    def _gather_persistent(self) -> None:
        """Bring back the small parameters that ZeRO 3 keeps everywhere: stage3.py does it in a step that it completes,
        and not in one that it leaves out; then the next backward pass would miss them."""
        if self._is_stage_3 and (persistent := self._wrapper.persistent_parameters):
            persistent[0].all_gather(persistent)

    @property
    def _is_stage_3(self) -> bool:
        return hasattr(self._wrapper, "persistent_parameters")

    def _find_masters(self) -> list[Tensor]:
        """The fp32 tensors that AdamW updates in this process: each wrapper of DeepSpeed names them differently."""
        for attribute in (
            "fp32_partitioned_groups_flat",  # stage 3: runtime/zero/stage3.py
            "single_partition_of_fp32_groups",  # stages 1 and 2: runtime/zero/stage_1_and_2.py
            "fp32_groups_flat_partition",  # stage 1 in bf16 with fp32 gradients: runtime/bf16_optimizer.py
        ):
            if hasattr(self._wrapper, attribute):
                return list(getattr(self._wrapper, attribute))
        raise AssertionError(f"{type(self._wrapper).__name__} is no wrapper of DeepSpeed 0.19.8")

    def _check_precision(self, config: PretrainConfig) -> None:
        """See that DeepSpeed will do what config.yaml says, its own settings asked."""
        engine, in_bf16 = self._deepspeed, config.precision == "bf16"
        assert engine.bfloat16_enabled() == in_bf16 and not engine.fp16_enabled(), "DeepSpeed's precision differs"
        computing, adding = engine.get_data_types()
        assert computing == (torch.bfloat16 if in_bf16 else torch.float32), f"DeepSpeed computes in {computing}"
        assert adding == torch.float32, f"DeepSpeed adds gradients up in {adding}"
        assert engine.zero_optimization_stage() == config.zero_stage, "DeepSpeed runs another ZeRO stage"
        assert engine.gradient_clipping() == config.gradient_clipping, "DeepSpeed clips otherwise"
        assert all(master.dtype == torch.float32 for master in self._masters.values()), "the optimizer is not in fp32"
