"""DeepSpeed's ZeRO (0.19.8), stages 1 to 3: gradients, weights and optimizer state sharded over the ranks.

The only file that names deepspeed, imported only where ZeRO updates the weights. Our optimizer is DeepSpeed's client:
it is given the flat fp32 tensors that DeepSpeed has cut for this rank, and told where in them the parameters are. An
upgrade begins with tests/unit/training/test_private_names.py, for the names that nothing else would miss.

At stages 1 and 2 each parameter group is one flat tensor, cut into as many equal parts as there are ranks: a border may
lie anywhere in a matrix. At stage 3 each parameter is cut by itself.
"""

import contextlib
import io
import logging
import math
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from zerokara.config.pretrain_config import TrainingSettings
from zerokara.model import parallel
from zerokara.model.builder import Model
from zerokara.model.layers import Layer
from zerokara.training.compute.engine import Accept, read_once
from zerokara.training.compute.optimizers import Optimizer, Place

# DeepSpeed asks whether an optimizer is its own Muon. Its functions are in a module that takes three seconds of a
# core to import, for torch.compile; none is called.
_of_muon = {"MuonWithAuxAdam": type("MuonWithAuxAdam", (), {}), "adam_update": None, "muon_update": None}
sys.modules["deepspeed.runtime.zero.muon.original_muon"] = types.SimpleNamespace(**_of_muon)  # type: ignore[assignment]
import deepspeed  # noqa: E402
from deepspeed.runtime import engine as deepspeed_engine  # noqa: E402
from deepspeed.runtime import utils  # noqa: E402
from deepspeed.runtime.zero import stage3, stage_1_and_2  # noqa: E402

_MPU = types.SimpleNamespace(  # functions: DeepSpeed keeps the first `mpu` that it is given for the life of the process
    get_model_parallel_rank=parallel.tensor_rank,
    get_model_parallel_world_size=parallel.tensor_size,
    get_model_parallel_group=parallel.tensor_group,
    get_data_parallel_rank=parallel.data_rank,
    get_data_parallel_world_size=parallel.data_size,
    get_data_parallel_group=parallel.data_group,
)
"""The groups by the names that DeepSpeed (0.19.8, utils/groups.py and bwc.py) asks for, where megatron-core says
get_tensor_model_parallel_*; without it DeepSpeed makes a second group of all processes."""


def _mark_not_finite(norm: Tensor, **_: Any) -> None:
    """Put -1 in place of a norm that is not finite; DeepSpeed's own function makes the host wait for the device."""
    norm.copy_(torch.where(norm.isfinite(), norm, -1.0))


class ZeroEngine:
    """An `engine.Engine`: DeepSpeed's ZeRO."""

    def __init__(self, model: Model, config: TrainingSettings, settings: dict[str, Any], device: torch.device):
        """See `engine_choice.open_engine`; `settings` are DeepSpeed's. The process groups must exist."""
        deepspeed.logger.setLevel(logging.ERROR)
        # torch 2.13 renames collectives that DeepSpeed 0.19.8 still calls by their old names; nobody here can act on it
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        deepspeed.ops.__compatible_ops__ = {}
        stage_1_and_2.mask_nan_or_inf_with_val_inplace = _mark_not_finite
        deepspeed_engine.BFLOAT16 = deepspeed_engine.ZERO_OPTIMIZATION
        deepspeed.init_distributed(torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False)
        self.model, self._device, self._is_stage_3 = model, device, settings["zero_optimization"]["stage"] == 3
        # DeepSpeed divides the loss by the number of micro batches, and at stage 3 the gradients by that of the ranks.
        self._ranks = float(parallel.data_size()) if self._is_stage_3 else 1.0
        self._micro_batches = settings["gradient_accumulation_steps"]
        dtype = torch.bfloat16 if config.number_format == "bf16" else torch.float32
        for parameter in model.parameters():  # undefined weights, without a copy of those that it has
            parameter.data = torch.empty(parameter.shape, dtype=dtype, device="cpu" if self._is_stage_3 else device)
        self.optimizer = Optimizer(config, dict(model.named_parameters()), model.shape, device)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        with contextlib.redirect_stdout(io.StringIO()):  # some of it is printed whatever the log level is
            if self._is_stage_3:  # partitioned one after another: DeepSpeed would first move them all to the device
                # Weights are gathered around a layer, not inside: torch.compile takes it as one graph.
                deepspeed.utils.set_z3_leaf_modules(model, [Layer])
                deepspeed.zero.Init(
                    model,
                    data_parallel_group=parallel.data_group(),
                    mpu=_MPU,
                    dtype=dtype,
                    config_dict_or_path=settings,
                )
            model.to(device, dtype)  # its buffers
            self.module, self._wrapper, _, _ = deepspeed.initialize(
                model=model, optimizer=self.optimizer, config=settings, dist_init_required=False, mpu=_MPU
            )
        places = self._partitions() if self._is_stage_3 else self._flat_partitions()
        held = {names[parameter]: place for parameter, place in places}
        computing, accumulating = self.module.get_data_types()
        others = [accumulating, self.module.communication_data_type, *(place.tensor.dtype for place in held.values())]
        assert computing == dtype and {*others} == {torch.float32}, f"DeepSpeed's precision: {computing}, {others}"
        self.optimizer.hold(held)
        if not self._is_stage_3:
            # In bf16 it would look at every gradient, and wait: where one is not finite, neither is the norm.
            self._wrapper.check_overflow = lambda partition_gradients=True: None

    def _flat_partitions(self) -> Iterator[tuple[int, Place]]:
        """Yield each parameter's id and place at stages 1 and 2."""
        ranks, rank, wrapper = range(parallel.data_size()), parallel.data_rank(), self._wrapper
        for group, parameters in enumerate(wrapper.round_robin_bit16_groups):
            (flat,) = self.optimizer.param_groups[group]["params"]
            length = len(flat)
            for parameter, offset in zip(parameters, wrapper.round_robin_bit16_offsets[group], strict=True):
                borders = [min(max(number * length - offset, 0), parameter.numel()) for number in (*ranks, len(ranks))]
                ranges = [range(*borders[each : each + 2]) for each in ranks]
                yield id(parameter), Place(flat, offset + borders[rank] - rank * length, ranges)

    def _partitions(self) -> Iterator[tuple[int, Place]]:
        """Yield each parameter's id and place at stage 3."""
        ranks = range(parallel.data_size())
        for parameters, flat in zip(self._wrapper.fp16_groups, self._wrapper.fp32_partitioned_groups_flat, strict=True):
            start = 0
            for parameter in parameters:
                length = parameter.partition_numel()
                borders = [min(number * length, parameter.ds_numel) for number in (*ranks, len(ranks))]
                yield id(parameter), Place(flat, start, [range(*borders[each : each + 2]) for each in ranks])
                start += length

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

        stage3.combine_grad_norm_groups = partial(decide, utils.combine_grad_norm_groups)
        stage_1_and_2.combine_grad_norm_groups = stage3.combine_grad_norm_groups
        self.optimizer.set_learning_rate(learning_rate)
        self.module.step()
        self.optimizer.num_updates += accepted
        if not accepted:
            self._gather_persistent()
        return value

    def round_masters(self) -> None:
        if not self._is_stage_3:
            self._wrapper.update_lp_params()
            return
        # What the end of `step` does in stage3.py, which has no name for it.
        if persistent := self._wrapper.persistent_parameters:
            persistent[0].partition(persistent)
        for group in range(len(self._wrapper.fp32_partitioned_groups_flat)):
            self._wrapper._reassign_or_swap_out_partitioned_parameters(group)
        self._wrapper.invalidate_secondary_tensor()
        self._gather_persistent()

    def _gather_persistent(self) -> None:
        """Gather the small parameters that ZeRO 3 keeps on every rank: stage3.py does so in a step that it completes,
        and not in one that it skips; the next backward pass would miss them."""
        if self._is_stage_3 and (persistent := self._wrapper.persistent_parameters):
            persistent[0].all_gather(persistent)
