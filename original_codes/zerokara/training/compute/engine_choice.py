"""The engine that updates the weights of a run, and DeepSpeed's settings.

`zero.ZeroEngine`, DeepSpeed's, serves every run of several processes, and every offload; `engine.LoneEngine` one
process, which has nothing to shard. docs/decisions.md says why. Without torch or deepspeed on
import: a plan names the engine, and checks DeepSpeed's template, before they are loaded.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from zerokara.base.errors import UserError
from zerokara.config.pretrain_config import TrainingSettings

if TYPE_CHECKING:
    import torch

    from zerokara.model.builder import Model
    from zerokara.training.compute.engine import Engine

HIERARCHY_KEY = "zero_hpz_partition_size"


def uses_deepspeed(config: TrainingSettings, data_parallel_size: int) -> bool:
    """Return True if DeepSpeed's engine serves a run of this data-parallel size; else that of a lone process does."""
    return data_parallel_size > 1 or config.tensor_parallel_size > 1 or config.offload != "none"


def hierarchy_of(template: Mapping[str, Any]) -> int:
    """Return how many ranks share one copy of the weights of a step; 1 means no hierarchical partitioning."""
    return int(template.get("zero_optimization", {}).get(HIERARCHY_KEY, 1))


def open_engine(model: "Model", config: TrainingSettings, template: dict[str, Any], device: "torch.device") -> "Engine":
    """Hand `model` to an engine; all weights are undefined until `engine.load_state`."""
    from zerokara.model import parallel

    if model.auxiliary:
        model.auxiliary.set_weight(0.0, device)  # the compiler looks at where the weight is
    if not uses_deepspeed(config, parallel.data_size()):
        from zerokara.training.compute.engine import LoneEngine

        return LoneEngine(model, config, device)
    from zerokara.training.compute.zero import ZeroEngine  # DeepSpeed takes seconds to import

    return ZeroEngine(model, config, settings_for(config, parallel.data_size(), template), device)


def plan_lines(config: TrainingSettings, data_parallel_size: int, template: Mapping[str, Any]) -> Iterator[str]:
    """Yield the engine that updates the weights, then what a user may want otherwise."""
    if not uses_deepspeed(config, data_parallel_size):
        yield "one process: nothing is sharded, and nothing sent"
        if config.deepspeed_template != "auto":
            yield "deepspeed_template has no effect in one process: DeepSpeed has no part in it"
        return
    yield f"DeepSpeed's ZeRO, stage {config.stage}, offload: {config.offload}"
    if (hierarchy := hierarchy_of(template)) > 1:
        off = f"switched off by {HIERARCHY_KEY}: 1 in deepspeed_template"
        yield f"hierarchical: every {hierarchy} ranks share the weights of a step, sent between machines once ({off})"


def for_machines(
    template: Mapping[str, Any], config: TrainingSettings, num_processes: int, nodes: int
) -> dict[str, Any]:
    """Return the template with what helps over several machines, where it is not stated.

    Gradients are summed beside the backward pass (`overlap_comm`). At stage 3 partitioning is hierarchical (ZeRO++,
    arXiv 2306.10209): each machine keeps the gathered weights of a step, cut over its own processes, so that one
    gathering of each step crosses the links between machines, and all others stay inside.

    Raises:
        UserError: the template states one that does not fit.
    """
    zero = ({"overlap_comm": True} if nodes > 1 else {}) | template.get("zero_optimization", {})
    if config.offload == "none" and not zero.keys().isdisjoint(("offload_optimizer", "offload_param")):
        rule = "its offload_optimizer and offload_param have no effect with offload: none"
        raise UserError(config.fault("deepspeed_template", rule, "remove them, or set offload", ["offload"]))
    possible = config.stage == 3 and config.tensor_parallel_size == 1 and config.offload == "none"
    size = zero.get(HIERARCHY_KEY, num_processes // nodes if possible and nodes > 1 else 1)
    if size == 1:
        return {**template, "zero_optimization": zero}
    if not possible or num_processes % size:
        rule = f"its {HIERARCHY_KEY}, {size}, must divide the {num_processes} processes, and needs zero_stage 3, "
        rule += "tensor_parallel_size 1 and offload none"
        raise UserError(config.fault("deepspeed_template", rule, "leave it out: it is chosen automatically"))
    return {**template, "zero_optimization": {**zero, HIERARCHY_KEY: size}}


def settings_for(config: TrainingSettings, num_processes: int, template: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's configuration: the `template`, which may not hold what is set here, and the rest."""
    zero = {**template.get("zero_optimization", {}), "stage": config.stage}
    for part, is_away in (("offload_optimizer", config.offload != "none"), ("offload_param", config.offload == "all")):
        if is_away:
            zero[part] = {**zero.get(part, {}), "device": "cpu"}
    return {
        **template,
        "train_batch_size": config.global_batch,
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": config.global_batch // (config.micro_batch * num_processes),
        "gradient_clipping": config.gradient_clipping,
        "zero_optimization": zero,
        "bf16": {"enabled": config.number_format == "bf16"},
        # Ours is on none of DeepSpeed's lists; it is tested in tests/numerics. So is torch's fused AdamW under offload,
        # on the CPU: DeepSpeedCPUAdam would be compiled while the run waits.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        # In bf16 DeepSpeed would sum gradients over the ranks in bf16, and over micro batches: each addition would
        # round, and accumulation change the result.
        "communication_data_type": "fp32",
        # A mean would be a division in bf16 before the sum. Stage 3 knows the mean alone, and divides in fp32.
        "gradient_allreduce_op": "mean" if config.stage == 3 else "sum",
        "data_types": {"grad_accum_dtype": "fp32"},
        # It would wait for the device twice in each micro batch.
        "timers": {"throughput": {"enabled": False}},
    }
