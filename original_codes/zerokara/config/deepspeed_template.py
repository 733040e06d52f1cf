"""DeepSpeed's further settings: the JSON file that `deepspeed_template` names, whose keys are passed on as they stand.

The keys are DeepSpeed 0.19's (its runtime/zero/config.py says what each does) that act in a run here. DeepSpeed itself
would ignore a mistyped one, or end every process with a traceback once they have started. The keys zero_quantized_… are
left out on purpose: what is sent in 8 bits depends on the number of GPUs, and so would the model. So is flops_profiler:
it does not see what fused functions compute, and counted a fifteenth of the operations of a small model.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from zerokara.config.loading import load
from zerokara.config.settings import Entry, NaturalInt, PositiveInt, Settings

_UNKNOWN = (
    "is not taken here: config.yaml sets optimizer, schedule, batch, clipping, precision, ZeRO stage and offload, and "
    "what else DeepSpeed may know has no effect, would mislead, or make the model depend on the number of GPUs"
)


class OffloadKeys(Entry):
    """Keys of an offload, except its device."""

    unknown: ClassVar[str] = _UNKNOWN
    pin_memory: bool = False


class ZeroKeys(Entry):
    """``zero_optimization``."""

    unknown: ClassVar[str] = _UNKNOWN
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: Annotated[PositiveInt, Field(le=2_000_000_000)] = 500_000_000
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: NaturalInt = 500_000_000
    overlap_comm: bool = False
    round_robin_gradients: bool = False
    sub_group_size: NaturalInt = 1_000_000_000
    stage3_prefetch_bucket_size: NaturalInt = 50_000_000
    stage3_param_persistence_threshold: NaturalInt = 100_000
    stage3_model_persistence_threshold: NaturalInt = 0
    stage3_max_live_parameters: NaturalInt = 1_000_000_000
    stage3_max_reuse_distance: NaturalInt = 1_000_000_000
    stage3_use_all_reduce_for_fetch_params: bool = False
    stage3_allgather_sequential: bool = False
    zero_hpz_partition_size: Annotated[int, Field(gt=0)] = 1
    offload_optimizer: OffloadKeys = OffloadKeys()
    offload_param: OffloadKeys = OffloadKeys()


class DeepSpeedTemplate(Settings):
    """The file. Defaults are never used: only what the file gives is passed on."""

    unknown: ClassVar[str] = _UNKNOWN
    zero_optimization: ZeroKeys = ZeroKeys()
    wall_clock_breakdown: bool = False


def load_template(deepspeed_template: str) -> dict[str, Any]:
    """Read the template of DeepSpeed's configuration that the setting names; `auto` is the project's own.

    Raises:
        UserError: it is missing, is no mapping, or has a key that is unknown, wrong, or owned by config.yaml.
    """
    is_ours = deepspeed_template == "auto"
    path = Path(__file__).parents[2] / "ds_config_gpt_TEMPLATE.json" if is_ours else Path(deepspeed_template)
    return load(DeepSpeedTemplate, path, named_by="deepspeed_template").model_dump(exclude_unset=True)
