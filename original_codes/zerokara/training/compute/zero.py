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
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed
from deepspeed.runtime import bf16_optimizer, utils
from deepspeed.runtime.zero import stage3, stage_1_and_2
from torch import Tensor

from zerokara.config.pretrain_config import TrainingSettings
from zerokara.model import parallel
from zerokara.model.builder import Model
from zerokara.training.compute import torch_optimizers
from zerokara.training.compute.engine import Accept, read_once


class ZeroEngine:
    """An `engine.Engine`: AdamW under DeepSpeed's ZeRO."""

    trains_all = True

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
        deepspeed.init_distributed(torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False)
        self.model, self._device, self._is_stage_3 = model, device, config.zero_stage == 3
        self.optimizer_name: str = config.optimizer_name
        # DeepSpeed divides the loss by the number of micro batches, and the gradients by that of the ranks.
        self._ranks, self._micro_batches = float(parallel.data_size()), settings["gradient_accumulation_steps"]
        dtype = torch.bfloat16 if config.number_format == "bf16" else torch.float32
        for parameter in model.parameters():  # undefined weights, without a copy of those that it has
            parameter.data = torch.empty(parameter.shape, dtype=dtype, device="cpu" if self._is_stage_3 else device)
        made = torch_optimizers.build(config, dict(model.named_parameters()), model.shape)
        self._adam = made["adamw"]
        mpu = parallel.ModelParallelUnit() if parallel.tensor_size() > 1 else None
        # runtime/bf16_optimizer.py narrates its memory on stdout whatever the log level is.
        with contextlib.redirect_stdout(io.StringIO()):
            if self._is_stage_3:  # partitioned one after another: DeepSpeed would first move them all to the device
                group = parallel.data_group() if mpu else None
                deepspeed.zero.Init(
                    model, data_parallel_group=group, mpu=mpu, dtype=dtype, config_dict_or_path=settings
                )
                model.to(device)  # its buffers
            self.module, self._wrapper, _, _ = deepspeed.initialize(
                model=model, optimizer=self._adam, config=settings, dist_init_required=False, mpu=mpu
            )
        if model.auxiliary:
            model.auxiliary.set_weight(0.0, device)  # the compiler looks at where the weight is
        self._parameters = dict(model.named_parameters())
        # The fp32 tensors that AdamW updates in this process; stage 3 puts them into its groups while it steps.
        masters = [master for group in self._adam.param_groups for master in group["params"]]
        masters = self._wrapper.fp32_partitioned_groups_flat if self._is_stage_3 else masters
        computing, accumulating = self.module.get_data_types()
        others = [accumulating, self.module.communication_data_type, *(master.dtype for master in masters)]
        assert computing == dtype and {*others} == {torch.float32}, f"DeepSpeed's precision: {computing}, {others}"
        torch_optimizers.make_state(config.optimizer_name, made, {str(n): each for n, each in enumerate(masters)})
        if not self._is_stage_3:
            self._wrapper._lazy_init_hp_params_optimizer_state()
            # In bf16 it would look at every gradient, and wait: where one is not finite, neither is the norm.
            self._wrapper.check_overflow = lambda partition_gradients=True: None

    def accumulate(self, batch: list[Tensor], global_tokens: float, global_sequences: float) -> Tensor:
        if self.model.auxiliary:
            self.model.auxiliary.set_weight(self._ranks / global_sequences, self._device)
        nats: Tensor = self.module(*batch)
        self.module.backward(nats / global_tokens * (self._ranks * self._micro_batches))
        if not self.module.is_gradient_accumulation_boundary():
            self.module.step()  # counts the micro batch; the last one's is in `update`
        return nats.detach()

    def update(self, learning_rate: float, numbers: Tensor | None = None, accept: Accept = lambda _: True) -> float:
        """DeepSpeed skips a step whose norm is infinite, in all ranks alike: `decide` makes it so."""
        value, accepted = math.nan, False

        def decide(norm_of: Callable[..., Tensor], *arguments: Any, **named: Any) -> Tensor:
            """Read the norm once, where DeepSpeed would up to four times, and the numbers of the step with it."""
            nonlocal value, accepted
            value, values = read_once(norm_of(*arguments, **named), numbers)
            value = math.inf if value < 0 else value  # DeepSpeed's sign for a norm that is not finite
            accepted = accept(values) and math.isfinite(value)
            return torch.tensor(value if accepted else math.inf)

        # By these DeepSpeed's wrappers get the norm, on the device; by the third stage 1 in bf16 with fp32 gradients.
        stage3.combine_grad_norm_groups = partial(decide, utils.combine_grad_norm_groups)
        stage_1_and_2.combine_grad_norm_groups = stage3.combine_grad_norm_groups
        bf16_optimizer.get_global_norm_of_tensors = partial(decide, utils.get_global_norm_of_tensors)
        for group in self._wrapper.param_groups:
            group["lr"] = learning_rate * group["lr_scale"]
        self.module.step()
        self.num_updates += accepted
        if not accepted:
            self._gather_persistent()
        return value

    def read(self, name: str, key: str | None) -> Tensor:
        parameter = self._parameters[name]
        if key:
            found = deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
        else:
            found = deepspeed.utils.safe_get_full_fp32_param(parameter)
        shape = getattr(parameter, "ds_shape", parameter.shape)  # under ZeRO 3 a parameter at rest is empty
        assert found is not None and found.dtype == torch.float32, f"DeepSpeed's {key or 'weights'} of {name}"
        return found.detach().view(shape)

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
            deepspeed.utils.safe_set_full_fp32_param(parameter, value)
        else:
            deepspeed.utils.safe_set_full_optimizer_state(parameter, value, key)

    def sync_from_master(self, num_updates: int) -> None:
        """DeepSpeed computes with a copy of the master weights."""
        self.num_updates = num_updates
        for state in self._adam.state.values():
            state["step"].fill_(num_updates)
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
