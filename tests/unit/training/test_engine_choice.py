"""Which engine serves a run, what the plan says of it, and the settings that DeepSpeed gets."""

from typing import Any

import pytest
from configs import config_of, fault_of

from zerokara.training.compute import engine_choice
from zerokara.training.compute.engine_choice import HIERARCHY_KEY

TEMPLATE = {"zero_optimization": {"overlap_comm": True}, "wall_clock_breakdown": False}


def plan_lines(zero_stage: int | str, ranks: int, template: dict, **others: Any) -> list[str]:
    config = config_of(zero_stage=zero_stage, global_batch_size=64, micro_batch_size=1, **others)
    return list(engine_choice.plan_lines(config, ranks, template))


def test_the_plan_names_the_engine() -> None:
    assert plan_lines("auto", 1, TEMPLATE) == ["one process: nothing is sharded, and nothing sent"]
    assert "no effect" in plan_lines("auto", 1, TEMPLATE, deepspeed_template="mine.json")[1]
    assert plan_lines(3, 4, TEMPLATE) == ["DeepSpeed's ZeRO, stage 3, offload: none"]
    assert plan_lines("auto", 1, TEMPLATE, offload="all") == ["DeepSpeed's ZeRO, stage 3, offload: all"]
    assert plan_lines(0, 2, TEMPLATE) == ["DeepSpeed's ZeRO, stage 1, offload: none"]


def test_what_crosses_machines_is_said() -> None:
    _, hierarchical = plan_lines(3, 16, {"zero_optimization": {HIERARCHY_KEY: 8}})
    assert "every 8 ranks" in hierarchical and f"{HIERARCHY_KEY}: 1" in hierarchical


def test_over_machines_sums_overlap_and_stage_3_is_hierarchical() -> None:
    template = {"zero_optimization": {"reduce_bucket_size": 5}}
    stage_3 = config_of(zero_stage=3)
    zero = engine_choice.for_machines(template, stage_3, 16, 2)["zero_optimization"]
    flat = {"overlap_comm": True, "reduce_bucket_size": 5}
    assert zero == {**flat, HIERARCHY_KEY: 8} and HIERARCHY_KEY not in template["zero_optimization"]
    assert engine_choice.for_machines(template, stage_3, 8, 1) == template, "one machine"
    cut = config_of(zero_stage=3, tensor_parallel_size=2)
    for config, processes in ((stage_3, 2), (config_of(zero_stage=2), 16), (cut, 16)):  # one process on each, or flat
        assert engine_choice.for_machines(template, config, processes, 2)["zero_optimization"] == flat
    stated = {"zero_optimization": {"overlap_comm": False, HIERARCHY_KEY: 1}}
    assert engine_choice.for_machines(stated, stage_3, 16, 2) == stated, "the user's own"


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (3, {"zero_stage": 3}),
        (2, {"zero_stage": 2}),
        (2, {"zero_stage": 3, "tensor_parallel_size": 2}),
    ],
)
def test_a_hierarchy_of_the_users_own_must_fit(size: int, settings: dict) -> None:
    template = {"zero_optimization": {HIERARCHY_KEY: size}}
    fault = fault_of(engine_choice.for_machines, template, config_of(**settings), 8, 1)
    assert fault.key == "deepspeed_template" and f"{HIERARCHY_KEY}, {size}, must divide the 8 processes" in fault.rule
    away = {"zero_optimization": {"offload_optimizer": {"pin_memory": True}}}
    assert fault_of(engine_choice.for_machines, away, config_of(), 8, 1).key == "deepspeed_template"
    assert engine_choice.for_machines(away, config_of(zero_stage=1, offload="optimizer"), 8, 1) == away
    fitting = {"zero_optimization": {HIERARCHY_KEY: 4}}
    assert engine_choice.for_machines(fitting, config_of(zero_stage=3), 8, 1) == fitting
