"""AdamW under DeepSpeed's ZeRO (0.19.8), stages 1 to 3: gradients, weights and state sharded over the ranks.

The only file that names deepspeed, imported only where the plan says that ZeRO updates the weights. Source of the
access to the state: deepspeed/utils/tensor_fragment.py (`safe_get_full_fp32_param` and its family).
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Sequence
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
from zerokara.training.compute import torch_optimizers
from zerokara.training.compute.engine import Accept, place, read_once, weigh_auxiliary_losses

_MASTERS = (
    "fp32_partitioned_groups_flat",  # stage 3: runtime/zero/stage3.py
    "single_partition_of_fp32_groups",  # stages 1 and 2: runtime/zero/stage_1_and_2.py
    "fp32_groups_flat_partition",  # stage 1 in bf16 with fp32 gradients: runtime/bf16_optimizer.py
)
"""The fp32 tensors that AdamW updates in this process: each wrapper of DeepSpeed names them differently."""


class ZeroEngine:
    """An `engine.Engine`: AdamW under DeepSpeed's ZeRO."""

    def __init__(self, model: Model, config: TrainingSettings, settings: dict[str, Any], device: torch.device):
        """See `updater.open_engine`; `settings` are DeepSpeed's. The process groups must exist."""
        deepspeed.logger.setLevel(logging.ERROR)
        # torch 2.13 renames collectives that DeepSpeed 0.19.8 still calls by their old names; nobody here can act on it
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        # deepspeed/comm/torch.py, build_shm_op, asks which C++ operators could be built. Finding out calls compilers
        # and queries GPUs, and on a CPU with a compiler it would then build one while the run waits; none is used here.
        deepspeed.ops.__compatible_ops__ = {}
        # utils/groups.py keeps the processes of hierarchical partitioning for good: those of an engine before this one.
        deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        backend = torch.distributed.get_backend()
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
        self.model = model
        self.optimizer_name: str = config.optimizer_name
        self._device, self._is_stage_3 = device, config.zero_stage == 3
        # DeepSpeed divides the loss by the number of micro batches, and the gradients by that of the ranks.
        self._ranks = float(parallel.data_size())
        self._micro_batches = settings["gradient_accumulation_steps"]
        self._is_within_step = False
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        place(model, dtype, torch.device("cpu") if self._is_stage_3 else device)
        made = torch_optimizers.build(config, dict(model.named_parameters()), model.shape)
        self._adam = made["adamw"]
        # runtime/bf16_optimizer.py narrates its memory on stdout whatever the log level is.
        with contextlib.redirect_stdout(io.StringIO()):
            if self._is_stage_3:
                _partition(model, settings, device, dtype)
            self.module, self._wrapper, _, _ = deepspeed.initialize(
                model=model,
                optimizer=self._adam,
                config=settings,
                dist_init_required=False,
                mpu=parallel.ModelParallelUnit() if parallel.tensor_size() > 1 else None,
            )
        weigh_auxiliary_losses(model, device, 0, math.inf)  # the compiler looks at where the weight is
        self._parameters = dict(model.named_parameters())
        masters = next(getattr(self._wrapper, name) for name in _MASTERS if hasattr(self._wrapper, name))
        computing, accumulating = self.module.get_data_types()
        others = [accumulating, self.module.communication_data_type, *(master.dtype for master in masters)]
        assert computing == dtype and {*others} == {torch.float32}, f"DeepSpeed's precision: {computing}, {others}"
        self._read_norm_once()
        # AdamW would make its state in the first update, too late to load a checkpoint's.
        numbered = {str(number): master for number, master in enumerate(masters)}
        torch_optimizers.make_state(config.optimizer_name, made, numbered)
        if hasattr(self._wrapper, "_lazy_init_hp_params_optimizer_state"):
            self._wrapper._lazy_init_hp_params_optimizer_state()

    @property
    def num_updates(self) -> int:
        """AdamW counts them."""
        return int(next(iter(self._adam.state.values()))["step"])

    def accumulate(
        self, batch: Sequence[Tensor], global_tokens: float, global_sequences: float | None = None
    ) -> Tensor:
        if self._is_within_step:
            self.module.step()  # ends the micro batch before this one
        self._is_within_step = True
        weigh_auxiliary_losses(self.model, self._device, global_tokens, global_sequences, self._ranks)
        nats: Tensor = self.module(*batch)
        self.module.backward(nats / global_tokens * (self._ranks * self._micro_batches))
        return nats.detach()

    def update(self, learning_rate: float, numbers: Tensor | None = None, accept: Accept = lambda _: True) -> float:
        """DeepSpeed itself skips a step whose norm is not finite."""
        torch_optimizers.set_learning_rate(self._wrapper.param_groups, learning_rate)
        self._numbers, self._accept, self._norm, self._accepted = numbers, accept, math.nan, False
        bf16_optimizer.get_global_norm_of_tensors = lambda **of: self._decide(get_global_norm_of_tensors(**of))
        try:
            self.module.step()
        finally:
            bf16_optimizer.get_global_norm_of_tensors = get_global_norm_of_tensors
        self._is_within_step = False
        if not self._accepted:
            self._gather_persistent()
        return self._norm

    def _decide(self, norm: Tensor) -> Tensor:
        """Read the norm and the numbers of the step; return the norm on the host, infinite to skip the step."""
        self._norm, values = read_once(norm, self._numbers)
        if self._norm < 0:  # DeepSpeed's sign for a norm that is not finite
            self._norm = math.inf
        self._accepted = self._accept(values) and math.isfinite(self._norm)
        return torch.tensor(self._norm if self._accepted else math.inf)

    def _read_norm_once(self) -> None:
        """Patch DeepSpeed to read the norm once, by `_decide`: it would read it up to four times.

        Each wrapper skips a step whose norm is infinite, in all ranks alike.
        """
        wrapper = self._wrapper
        if self._is_stage_3:  # runtime/zero/stage3.py
            norms = wrapper._get_norm_groups
            wrapper._get_norm_groups = lambda: [self._decide(combine_grad_norm_groups(norms()))]
        elif hasattr(wrapper, "scaled_global_norm"):  # stages 1 and 2: runtime/zero/stage_1_and_2.py
            norm = wrapper.scaled_global_norm
            wrapper.scaled_global_norm = lambda: self._decide(norm())
            # In bf16 it would look at every gradient, and wait: where one is not finite, neither is the norm.
            wrapper.check_overflow = lambda partition_gradients=True: None
        # Stage 1 in bf16 with fp32 gradients, runtime/bf16_optimizer.py, calls a function: see `update`.

    def read(self, name: str, key: str | None) -> Tensor:
        parameter = self._parameters[name]
        found = safe_get_full_optimizer_state(parameter, key) if key else safe_get_full_fp32_param(parameter)
        shape = getattr(parameter, "ds_shape", parameter.shape)  # under ZeRO 3 a parameter at rest is empty
        return found.detach().view(shape).to(torch.float32)

    def write(self, name: str, key: str | None, value: Tensor) -> None:
        parameter, value = self._parameters[name], value.to(self._device)
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

    def sync_from_master(self, num_updates: int) -> None:
        """DeepSpeed computes with a copy of the master weights."""
        torch_optimizers.set_count({"adamw": self._adam}, num_updates)
        if not self._is_stage_3:
            self._wrapper.update_lp_params()
            return
        # What the end of `step` does in stage3.py, which has no name for it.
        self._wrapper._partition_all_parameters()
        for group in range(len(self._wrapper.fp32_partitioned_groups_flat)):
            self._wrapper._reassign_or_swap_out_partitioned_parameters(group)
        # Each machine's own copy of the weights is of those before, and would be gathered in their place.
        self._wrapper.invalidate_secondary_tensor()
        self._gather_persistent()

    def _gather_persistent(self) -> None:
        """Gather the small parameters that ZeRO 3 keeps on every rank: stage3.py does so in a step that it completes,
        and not in one that it skips; the next backward pass would miss them."""
        if self._is_stage_3 and (persistent := self._wrapper.persistent_parameters):
            persistent[0].all_gather(persistent)


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
