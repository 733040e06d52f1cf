"""AdamW under DeepSpeed's ZeRO (0.19.8), stages 1 to 3: the second implementation of `engine.Engine`.

The only file that names deepspeed, imported only where the plan says that ZeRO updates the weights. Source of the
access to the state: deepspeed/utils/tensor_fragment.py (`safe_get_full_fp32_param` and its family).
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from typing import Any

import deepspeed
import torch
import torch.distributed
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.utils import combine_grad_norm_groups, get_global_norm_of_tensors
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor

from zerokara.config.pretrain_config import TrainingSettings
from zerokara.model import parallel
from zerokara.model.builder import Model
from zerokara.training.compute import devices, torch_optimizers
from zerokara.training.compute.deepspeed_settings import settings_for
from zerokara.training.compute.engine import Accept, Engine, take_weights


class ZeroUpdater(Engine):
    """An engine: AdamW, its state (gradients, weights) sharded over the data-parallel ranks by DeepSpeed's ZeRO."""

    def __init__(
        self,
        model: Model,
        config: TrainingSettings,
        data_parallel_size: int,
        template: dict[str, Any],
        has_weights: bool,
    ):
        """Take over `model`, whose weights must be fp32; the process groups must exist.

        `has_weights`: see `updater.open_engine`.
        """
        super().__init__(model, config)
        _attach_to_process_groups()
        # DeepSpeed divides the loss by the number of micro batches, and the gradients by that of the ranks.
        self.gradient_factor = float(data_parallel_size)
        self._num_micro_batches = config.global_batch // (config.micro_batch * data_parallel_size)
        # DeepSpeed makes its master weights from rounded ones: ours are written afterwards, as they are.
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        weights = take_weights(model, dtype, self._device if config.zero_stage < 3 else torch.device("cpu"))
        settings = settings_for(config, data_parallel_size, template, self._device.type)
        made = torch_optimizers.build(config, dict(model.named_parameters()), model.shape)
        self._adam = made["adamw"]
        # runtime/bf16_optimizer.py narrates its memory on stdout whatever the log level is.
        with contextlib.redirect_stdout(io.StringIO()):
            if config.zero_stage == 3:
                _partition(model, settings, self._device, dtype)
            self._deepspeed, self._wrapper, _, _ = deepspeed.initialize(
                model=model,
                optimizer=self._adam,
                config=settings,
                dist_init_required=False,
                mpu=parallel.ModelParallelUnit() if parallel.tensor_size() > 1 else None,
            )
        self.module = self._deepspeed
        self._parameters = dict(model.named_parameters())
        self._masters = {str(number): master for number, master in enumerate(self._find_masters())}
        self._check_precision(config)
        self._judgement = _Judgement(torch.zeros(0), lambda _: True)
        self._read_norm_once()
        # AdamW would make its state in the first update, too late to load a checkpoint's.
        torch_optimizers.make_state(config.optimizer_name, made, self._masters)
        if hasattr(self._wrapper, "_lazy_init_hp_params_optimizer_state"):
            self._wrapper._lazy_init_hp_params_optimizer_state()
        self._write_local(weights if has_weights else {})

    @property
    def num_updates(self) -> int:
        """AdamW counts them; see `Engine.num_updates`."""
        return int(next(iter(self._adam.state.values()))["step"])

    def _backward(self, loss: Tensor) -> None:
        self._deepspeed.backward(loss * (self.gradient_factor * self._num_micro_batches))

    def finish_micro_batch(self) -> None:
        self._deepspeed.step()

    def _update(self, learning_rate: float, numbers: Tensor, accept: Accept) -> float:
        """DeepSpeed itself skips a step whose norm is not finite; see `Engine.update`."""
        torch_optimizers.set_learning_rate(self._deepspeed.optimizer.param_groups, learning_rate)
        self._judgement = _Judgement(numbers, accept)
        bf16_optimizer.get_global_norm_of_tensors = self._norm_of_tensors
        try:
            self._deepspeed.step()
        finally:
            bf16_optimizer.get_global_norm_of_tensors = get_global_norm_of_tensors
        if not self._judgement.is_accepted:
            self._gather_persistent()
        return self._judgement.norm

    def _read_norm_once(self) -> None:
        """Let DeepSpeed's wrapper have the norm from us, on the host and judged: it would read it up to four times.

        Each wrapper drops a step whose norm is infinite, in all ranks alike.
        """
        wrapper = self._wrapper
        if self._is_stage_3:  # runtime/zero/stage3.py
            norms = wrapper._get_norm_groups
            wrapper._get_norm_groups = lambda: [self._judgement.of(combine_grad_norm_groups(norms()))]
        elif hasattr(wrapper, "scaled_global_norm"):  # stages 1 and 2: runtime/zero/stage_1_and_2.py
            norm = wrapper.scaled_global_norm
            wrapper.scaled_global_norm = lambda: self._judgement.of(norm())
            # In bf16 it would look at every gradient, and wait: where one is not finite, neither is the norm.
            wrapper.check_overflow = lambda partition_gradients=True: None
        # Stage 1 in bf16 with fp32 gradients, runtime/bf16_optimizer.py, calls a function: see `update`.

    def _norm_of_tensors(self, **arguments: Any) -> Tensor:
        return self._judgement.of(get_global_norm_of_tensors(**arguments))

    def _read(self, name: str, key: str | None) -> Tensor:
        parameter = self._parameters[name]
        found = safe_get_full_optimizer_state(parameter, key) if key else safe_get_full_fp32_param(parameter)
        assert found is not None, f"{name}: DeepSpeed gives no {key or 'weights'}"
        return found.detach().view(self._shapes[name]).to(torch.float32)  # under ZeRO 3 a parameter at rest is empty

    def _write(self, name: str, key: str | None, value: Tensor) -> None:
        parameter, value = self._parameters[name], value.to(self._deepspeed.device)
        if self._is_stage_3:
            # stage3.py, set_full_hp_param, asks the last rank for more than there is where the partitions are unequal:
            # a norm of 256 among three ranks.
            partition, _ = self._wrapper._get_fp32_opt_state_partition(parameter, False, optim_state_key=key)
            begin = partition.numel() * self._wrapper._get_param_partition_rank(parameter)
            mine = value.flatten()[begin : begin + partition.numel()]
            partition.data[: mine.numel()].copy_(mine)
        elif key is None:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, key)

    def _take_up_written(self, num_updates: int) -> None:
        """DeepSpeed computes with a copy of the master weights."""
        torch_optimizers.set_count({"adamw": self._adam}, num_updates)
        if not self._is_stage_3:
            self._wrapper.update_lp_params()
            return
        # What the end of `step` does in stage3.py, which has no name for it.
        self._wrapper._partition_all_parameters()
        for group in range(len(self._masters)):
            self._wrapper._reassign_or_swap_out_partitioned_parameters(group)
        # Each machine's own copy of the weights is of those before, and would be gathered in their place.
        self._wrapper.invalidate_secondary_tensor()
        self._gather_persistent()

    def _gather_persistent(self) -> None:
        """Gather the small parameters that ZeRO 3 keeps on every rank: stage3.py does so in a step that it completes,
        and not in one that it skips; the next backward pass would miss them."""
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

    def _check_precision(self, config: TrainingSettings) -> None:
        """Check, by DeepSpeed's own settings, that it does what config.yaml says."""
        engine, in_bf16 = self._deepspeed, config.precision == "bf16"
        dtype = torch.bfloat16 if in_bf16 else torch.float32
        assert engine.bfloat16_enabled() == in_bf16 and not engine.fp16_enabled(), "DeepSpeed's precision differs"
        computing, accumulation = engine.get_data_types()
        assert computing == dtype, f"DeepSpeed computes in {computing}"
        assert accumulation == torch.float32, f"DeepSpeed accumulates gradients in {accumulation}"
        assert engine.communication_data_type == torch.float32, "DeepSpeed sums gradients over ranks otherwise"
        assert not engine.tput_timer.config.enabled, "DeepSpeed times each micro batch"
        assert engine.zero_optimization_stage() == config.zero_stage, "DeepSpeed runs another ZeRO stage"
        assert engine.gradient_clipping() == config.gradient_clipping, "DeepSpeed clips otherwise"
        assert all(weight.dtype == dtype for weight in self._parameters.values()), f"weights are not {dtype}"
        assert all(master.dtype == torch.float32 for master in self._masters.values()), "the optimizer is not in fp32"


class _Judgement:
    """Whether one step may change the weights."""

    def __init__(self, numbers: Tensor, accept: Accept):
        """See `Engine.update`."""
        self._numbers, self._accept = numbers, accept
        self.norm, self.is_accepted = math.nan, False

    def of(self, norm: Tensor) -> Tensor:
        """Judge by a norm on the device; return it as a tensor of the host's, infinite where the step is refused."""
        self.norm, *values = devices.read(torch.cat([norm.double().view(1), self._numbers]))
        if self.norm < 0:  # DeepSpeed's sign for a norm that is not finite
            self.norm = math.inf
        self.is_accepted = self._accept(values) and math.isfinite(self.norm)
        return torch.tensor(self.norm if self.is_accepted else math.inf)


def _partition(model: Model, settings: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
    """Partition the parameters for ZeRO 3, one after another: DeepSpeed would first move them all to the device."""
    offload, is_cut = settings["zero_optimization"].get("offload_param", {}), parallel.tensor_size() > 1
    deepspeed.zero.Init(
        module=model,
        data_parallel_group=parallel.data_group() if is_cut else None,
        mpu=parallel.ModelParallelUnit() if is_cut else None,
        dtype=dtype,
        config_dict_or_path=settings,
        remote_device=offload.get("device"),
        pin_memory=offload.get("pin_memory", True),  # DeepSpeed's default
    )
    model.to(device)  # its buffers


def _attach_to_process_groups() -> None:
    """Let DeepSpeed use the process groups that exist."""
    deepspeed.logger.setLevel(logging.ERROR)
    # torch 2.13 renames collectives that DeepSpeed 0.19.8 still calls by their old names; nobody here can act on it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # deepspeed/comm/torch.py, build_shm_op, asks which C++ operators could be built. Finding out calls compilers and
    # queries GPUs, and on a CPU with a compiler it would then build one while the run waits; none is used here.
    deepspeed.ops.__compatible_ops__ = {}
    # utils/groups.py keeps the processes of hierarchical partitioning for good: those of an engine before this one.
    deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    backend = torch.distributed.get_backend()
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
