"""Which engine updates the weights of a run, and the settings of DeepSpeed where it is DeepSpeed's.

`replicated.ReplicatedEngine` (ours) serves ZeRO stage 0, stage 1 of a lone data-parallel rank, and Adafactor and Muon;
`zero.ZeroEngine` (DeepSpeed's) serves AdamW at all other stages, and every offload; docs/decisions.md says why.

DeepSpeed gets the settings that our configuration owns, and the user's template for all others. Without torch or
deepspeed on import: a plan names the engine, and checks the template, before anything heavy is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson

from zerokara.config.loading import text_of
from zerokara.config.pretrain_config import TrainingSettings
from zerokara.errors import Fault, UserError

if TYPE_CHECKING:
    import torch

    from zerokara.model.builder import Model
    from zerokara.training.compute.engine import Engine

UpdaterName = Literal["replicated", "zero"]
HIERARCHY_KEY = "zero_hpz_partition_size"
_OWNED = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "global_batch_size and micro_batch_size",
    "gradient_clipping": "gradient_clipping",
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.device": "offload",
    "zero_optimization.offload_param.device": "offload",
    "bf16.enabled": "precision",
    "fp16": "precision",
    "optimizer": "lr and adam_*",
    "scheduler": "lr_schedule",
    "data_types.grad_accum_dtype": "precision",
    "communication_data_type": "nothing (always fp32)",
    "timers.throughput.enabled": "nothing (always false)",
    "zero_allow_untested_optimizer": "nothing (always true)",
    "zero_force_ds_cpu_optimizer": "nothing (always false)",
    "steps_per_print": "log_interval",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
"""DeepSpeed's key and the key of config.yaml that sets it."""


def choose(zero_stage: int, optimizer: str, offload: str, data_parallel_size: int) -> UpdaterName:
    """Which updater serves a run; `data_parallel_size` ranks share the global batch."""
    nothing_to_shard = zero_stage == 1 and data_parallel_size == 1 and offload == "none"
    return "replicated" if zero_stage == 0 or optimizer != "adamw" or nothing_to_shard else "zero"


def open_engine(
    model: Model,
    config: TrainingSettings,
    updater: UpdaterName,
    template: dict[str, Any],
    device: torch.device,
) -> Engine:
    """Hand `model` to an engine; all weights are undefined until `engine.start_from` or `engine.load_state`."""
    if updater == "replicated":
        from zerokara.training.compute.replicated import ReplicatedEngine

        return ReplicatedEngine(model, config, device)
    from zerokara.model import parallel
    from zerokara.training.compute.zero import ZeroEngine  # DeepSpeed takes seconds to import

    return ZeroEngine(model, config, settings_for(config, parallel.data_size(), template, device.type), device)


def plan_lines(
    name: UpdaterName,
    zero_stage: int,
    data_parallel_size: int,
    template_name: str,
    template: dict[str, Any],
    nodes: int = 1,
    micro_batches: int = 1,
) -> Iterator[str]:
    """Which updater updates the weights, and which settings of DeepSpeed's template therefore have no effect.

    Over several `nodes`, with so many `micro_batches` of a process in a step, also what crosses the links between them.
    """
    if name == "zero":
        yield f"DeepSpeed's ZeRO, stage {zero_stage}"
        if zero_stage == 2 and nodes > 1 and micro_batches > 1:
            yield (
                f"gradients cross the {nodes} machines for each of {micro_batches} micro batches: zero_stage: 1 sends "
                "them once a step, where its gradients fit"
            )
        hierarchy = template.get("zero_optimization", {}).get(HIERARCHY_KEY, 1)
        if hierarchy > 1:
            yield (
                f"hierarchical: each {hierarchy} ranks keep the weights of a step among themselves, so that one "
                f"gathering of each step crosses machines ({HIERARCHY_KEY}: 1 in {template_name} switches it off)"
            )
        return
    sharding = f"optimizer state sharded by tensor over {data_parallel_size} ranks" if zero_stage else "nothing sharded"
    if data_parallel_size == 1:
        sharding = "one data-parallel rank has nothing to shard"
    yield f"zerokara's own, not DeepSpeed's ZeRO: {sharding}"
    if template:
        yield f"so {template_name} has no effect on this run ({', '.join(template)})"


def overlaps(zero_stage: int, device_type: str, template: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed sums gradients over the ranks beside the backward pass: as the template says, or on a GPU.

    At stages 2 and 3, which sum those of each micro batch; stage 1 in bf16 cannot (runtime/bf16_optimizer.py), and in
    fp32 would gain only in the last micro batch of a step. On a CPU both would run on the same cores.
    """
    stated = template.get("zero_optimization", {}).get("overlap_comm")
    return bool(stated) if stated is not None else zero_stage >= 2 and device_type == "cuda"


def with_hierarchy(
    template: Mapping[str, Any], config: TrainingSettings, num_processes: int, nodes: int
) -> dict[str, Any]:
    """The template with hierarchical partitioning (ZeRO++, arXiv 2306.10209) where it helps and is not stated.

    At stage 3 each machine then keeps the gathered weights of a step, cut over its own processes: one gathering of each
    step crosses the links between machines, and all others stay inside.
    """
    zero, here = template.get("zero_optimization", {}), num_processes // nodes
    helps = config.zero_stage == 3 and nodes > 1 and here > 1
    if not helps or HIERARCHY_KEY in zero or config.tensor_parallel_size > 1 or config.offload != "none":
        return dict(template)
    return {**template, "zero_optimization": {**zero, HIERARCHY_KEY: here}}


def hierarchy_fault(template: Mapping[str, Any], config: TrainingSettings, num_processes: int) -> Fault | None:
    """What is wrong with the user's own hierarchical partitioning."""
    size = template.get("zero_optimization", {}).get(HIERARCHY_KEY, 1)
    if size == 1:
        return None
    if not isinstance(size, int) or size < 1 or num_processes % size:
        rule = f"must be a divisor of the {num_processes} processes"
    elif config.zero_stage != 3 or config.tensor_parallel_size > 1 or config.offload != "none":
        rule = "needs zero_stage 3, tensor_parallel_size 1 and offload none"
    else:
        return None
    return Fault("deepspeed_template", rule, HIERARCHY_KEY, size, "leave it out: over machines it is chosen")


def settings_for(
    config: TrainingSettings, num_processes: int, template: dict[str, Any], device_type: str = "cpu"
) -> dict[str, Any]:
    """DeepSpeed's configuration as a dictionary, for processes that compute on a device of this type."""
    bf16 = config.precision == "bf16"
    owned: dict[str, Any] = {
        "train_batch_size": config.global_batch,
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": config.global_batch // (config.micro_batch * num_processes),
        "gradient_clipping": config.gradient_clipping,
        "zero_optimization": {
            "stage": config.zero_stage,
            "overlap_comm": overlaps(config.zero_stage, device_type, template),
            **({"offload_optimizer": {"device": "cpu"}} if config.offload != "none" else {}),
            **({"offload_param": {"device": "cpu"}} if config.offload == "all" else {}),
        },
        "bf16": {"enabled": bf16},
        # Our optimizer is torch's fused AdamW, which DeepSpeed has on no list; it is tested in tests/numerics. So it is
        # under offload, on the CPU: DeepSpeedCPUAdam would be compiled while the run waits.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        # In bf16 DeepSpeed would sum gradients over the ranks in bf16: each addition would round.
        "communication_data_type": "fp32",
        # It would wait for the device twice in each micro batch.
        "timers": {"throughput": {"enabled": False}},
    }
    if bf16:
        # Adding micro batches up in bf16 would round each time, and make accumulation change the result.
        owned["data_types"] = {"grad_accum_dtype": "fp32"}
    return _merged(template, owned)


def load_template(path: Path) -> dict[str, Any]:
    """Read the user's template.

    Raises:
        UserError: it is missing, not JSON, or sets a key that config.yaml owns; names every such key.
    """
    try:
        text = text_of(path, "deepspeed_template")
        template = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UserError(Fault(where=f"{path}:{error.lineno}", rule=f"is not JSON: {error.msg}")) from error
    if not isinstance(template, dict):
        raise UserError(Fault(where=str(path), rule="must hold one JSON object"))
    faults = []
    for key, setting in _OWNED.items():
        *above, last = key.split(".")
        place = template
        for name in above:
            place = below if isinstance(below := place.get(name), dict) else {}
        if last in place:
            found = re.search(rf'"{re.escape(last)}"\s*:', text)
            line = text[: found.start()].count("\n") + 1 if found else 1
            rule = f"belongs to config.yaml ({setting})"
            faults.append(Fault(f"{path}:{line}", rule, key, place[last], "remove it here"))
    if faults:
        raise UserError(faults)
    return template


def _merged(template: dict[str, Any], owned: dict[str, Any]) -> dict[str, Any]:
    merged = dict(template)
    for key, value in owned.items():
        below = template.get(key)
        merged[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
