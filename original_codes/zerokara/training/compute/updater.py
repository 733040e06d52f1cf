"""Which of the two implementations of `engine.Engine` updates the weights of a run.

=====================  ==========================================================  ===================================
updater                serves                                                      sharded over data-parallel ranks
=====================  ==========================================================  ===================================
`ReplicatedUpdater`    ZeRO stage 0; stage 1 of a lone data-parallel rank;         nothing; at stage 1 the fp32 master
(ours)                 Adafactor and Muon at stages 0 and 1                        weights and the optimizer state, by
                                                                                   whole tensors
`ZeroUpdater`          AdamW at ZeRO stages 1 to 3, with or without offload        stage 1: master weights and state;
(DeepSpeed's)                                                                      2: gradients too; 3: weights too
=====================  ==========================================================  ===================================

Why two: DeepSpeed's stage 0 accumulates bf16 gradients in bf16, and its stages 1 to 3 cut a flat buffer of parameters
anywhere, so that no matrix keeps the rows and columns that Adafactor and Muon need. A lone rank at stage 1 has nothing
to shard, and DeepSpeed's copies of the gradients took a tenth of a step of 40M parameters on two cores.

Without torch on import: the plan names the updater before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from zerokara.config.pretrain_config import TrainingSettings
from zerokara.training.compute.deepspeed_settings import HIERARCHY_KEY

if TYPE_CHECKING:
    from zerokara.model.builder import Model
    from zerokara.training.compute.engine import Engine

UpdaterName = Literal["replicated", "zero"]


def choose(zero_stage: int, optimizer: str, offload: str, data_parallel_size: int) -> UpdaterName:
    """Which updater serves a run; `data_parallel_size` ranks share the global batch."""
    nothing_to_shard = zero_stage == 1 and data_parallel_size == 1 and offload == "none"
    return "replicated" if zero_stage == 0 or optimizer != "adamw" or nothing_to_shard else "zero"


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
    if zero_stage and data_parallel_size > 1:
        sharding = f"optimizer state sharded by tensor over {data_parallel_size} ranks"
    else:
        sharding = "nothing sharded" if data_parallel_size > 1 else "one data-parallel rank has nothing to shard"
    yield f"zerokara's own, not DeepSpeed's ZeRO: {sharding}"
    if template:
        yield f"so {template_name} has no effect on this run ({', '.join(template)})"


def open_engine(
    model: Model,
    config: TrainingSettings,
    updater: UpdaterName,
    data_parallel_size: int,
    template: dict[str, Any],
    has_weights: bool = True,
) -> Engine:
    """Hand `model`, whose weights must be fp32, to an updater; its weights become the master weights unrounded.

    Without `has_weights` those of the model are undefined, and so are the engine's until `Engine.start_from` or
    `Engine.load_state` sets them.
    """
    if updater == "replicated":
        from zerokara.training.compute.replicated_updater import ReplicatedUpdater

        return ReplicatedUpdater(model, config, has_weights)
    from zerokara.training.compute.zero_updater import ZeroUpdater  # DeepSpeed takes seconds to import

    return ZeroUpdater(model, config, data_parallel_size, template, has_weights)
