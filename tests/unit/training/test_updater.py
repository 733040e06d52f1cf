"""Which updater serves a run, what the plan says of it, and the settings that DeepSpeed gets."""

from pathlib import Path
from typing import Any

import pytest
from configs import config_of, fault_of, refused

from zerokara.training.compute import updater
from zerokara.training.compute.updater import HIERARCHY_KEY

TEMPLATE = {"zero_optimization": {"overlap_comm": True}, "wall_clock_breakdown": False}


@pytest.mark.parametrize(
    ("zero_stage", "optimizer", "offload", "ranks", "expected"),
    [
        (0, "adamw", "none", 8, "replicated"),
        (1, "adamw", "none", 1, "replicated"),  # nothing to shard
        (2, "adamw", "none", 1, "sharded"),  # as it is measured
        (1, "adamw", "none", 2, "sharded"),
        (3, "adamw", "none", 4, "sharded"),
        (1, "adamw", "optimizer", 1, "deepspeed"),
        (3, "adamw", "all", 4, "deepspeed"),
        (1, "adafactor", "none", 4, "replicated"),  # needs whole matrices
        (1, "muon", "none", 4, "replicated"),
    ],
)
def test_the_engine_of_a_run(zero_stage: int, optimizer: str, offload: str, ranks: int, expected: str) -> None:
    config = config_of(zero_stage=zero_stage, optimizer=optimizer, offload=offload)
    assert updater.engine_kind(config, ranks, {}) == expected
    assert updater.gathers_inside_layers(config, ranks, {}) is (offload == "all")


def test_hierarchical_partitioning_is_deepspeeds() -> None:
    hierarchical = {"zero_optimization": {HIERARCHY_KEY: 2}}
    assert updater.engine_kind(config_of(zero_stage=3), 4, hierarchical) == "deepspeed"
    assert updater.gathers_inside_layers(config_of(zero_stage=3), 4, hierarchical)


def plan_lines(
    zero_stage: int, ranks: int, template: dict, nodes: int = 1, global_batch: int = 64, **others: Any
) -> list[str]:
    config = config_of(zero_stage=zero_stage, global_batch_size=global_batch, micro_batch_size=1, **others)
    return list(updater.plan_lines(config, ranks, nodes, template))


def test_a_template_without_effect_is_named_with_its_keys() -> None:
    own = {"deepspeed_template": "mine.json"}
    lines = plan_lines(1, 1, TEMPLATE, **own)
    assert len(lines) == 2 and all(word in lines[1] for word in ("template", "no effect", *TEMPLATE))
    assert len(plan_lines(1, 1, TEMPLATE)) == 1, "nobody asked for the shipped one"
    sharded, without = plan_lines(3, 4, TEMPLATE, **own)
    assert "FSDP2, as ZeRO stage 3" in sharded and "no effect" in without
    (line,) = plan_lines(1, 1, TEMPLATE, offload="optimizer")
    assert line == "DeepSpeed's ZeRO, stage 1"


def test_what_crosses_machines_is_said() -> None:
    plain, told = plan_lines(2, 16, {}, nodes=2)
    assert plain == "torch's FSDP2, as ZeRO stage 2" and "each of 4 micro batches: with zero_stage: 1" in told
    for nodes, global_batch, stage in ((1, 64, 2), (2, 16, 2), (2, 64, 1)):
        assert len(plan_lines(stage, 16, {}, nodes, global_batch)) == 1
    _, hierarchical = plan_lines(3, 16, {"zero_optimization": {HIERARCHY_KEY: 8}}, nodes=2)
    assert "each 8 ranks" in hierarchical and f"{HIERARCHY_KEY}: 1" in hierarchical


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_our_settings_are_merged_into_the_template(stage: int, device: str) -> None:
    """Gradients are summed beside the backward pass on a GPU, unless the template says otherwise."""
    config = config_of(zero_stage=stage, precision="fp32", global_batch_size=32, micro_batch_size=8)
    found = updater.settings_for(config, 2, updater.load_template("auto"), device)["zero_optimization"]
    assert found["overlap_comm"] is (stage > 1 and device == "cuda")
    for stated in (True, False):
        template = {"zero_optimization": {"overlap_comm": stated}, "x": 1}
        settings = updater.settings_for(config, 2, template, device)
        assert settings["zero_optimization"] == {"overlap_comm": stated, "stage": stage}
        assert (settings["train_batch_size"], settings["gradient_accumulation_steps"], settings["x"]) == (32, 2, 1)
        assert settings["bf16"] == {"enabled": False}


def test_a_template_that_sets_what_the_config_owns_is_refused_with_every_key(tmp_path: Path) -> None:
    path = tmp_path / "template.json"
    path.write_text(
        '{\n  "fp16": {"enabled": true},\n  "zero_optimization": {\n    "stage": 3\n  }\n}\n', encoding="utf-8"
    )
    faults = refused(updater.load_template, str(path))
    assert {(fault.where, fault.key, str(fault.value)) for fault in faults} == {
        (f"{path}:2", "fp16", "{'enabled': True}"),
        (f"{path}:4", "zero_optimization.stage", "3"),
    }
    assert all("config.yaml" in fault.rule for fault in faults)


@pytest.mark.parametrize(
    ("content", "keyword"),
    [
        (None, "no such file"),
        ("{", "JSON"),
        ("[]", "object"),
        ('{"a": ' * 100_000, "256 kB"),
        ('{"a": ' * 20_000 + "1" + "}" * 20_000, "JSON"),
    ],
)
def test_a_template_that_is_no_json_object_is_refused(tmp_path: Path, content: str | None, keyword: str) -> None:
    path = tmp_path / "template.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    fault = fault_of(updater.load_template, str(path))
    assert fault.where.startswith(str(path)) and keyword in fault.rule


def test_over_machines_stage_3_is_hierarchical() -> None:
    template = {"zero_optimization": {"reduce_bucket_size": 5}}
    stage_3 = config_of(zero_stage=3)
    zero = updater.with_hierarchy(template, stage_3, 16, 2)["zero_optimization"]
    assert zero == {"reduce_bucket_size": 5, HIERARCHY_KEY: 8} and HIERARCHY_KEY not in template["zero_optimization"]
    assert updater.with_hierarchy(template, stage_3, 8, 1) == template, "one machine"
    assert updater.with_hierarchy(template, stage_3, 2, 2) == template, "one process on each"
    assert updater.with_hierarchy(template, config_of(zero_stage=2), 16, 2) == template
    assert updater.with_hierarchy(template, config_of(zero_stage=3, tensor_parallel_size=2), 16, 2) == template
    stated = {"zero_optimization": {HIERARCHY_KEY: 1}}
    assert updater.with_hierarchy(stated, stage_3, 16, 2) == stated, "the user's own"


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (3, {"zero_stage": 3}),
        ("many", {"zero_stage": 3}),
        (2, {"zero_stage": 2}),
        (2, {"zero_stage": 3, "tensor_parallel_size": 2}),
    ],
)
def test_a_hierarchy_of_the_users_own_must_fit(size: object, settings: dict) -> None:
    template = {"zero_optimization": {HIERARCHY_KEY: size}}
    fault = fault_of(updater.with_hierarchy, template, config_of(**settings), 8, 1)
    assert fault.key == "deepspeed_template" and f"{HIERARCHY_KEY}, {size}, must divide the 8 processes" in fault.rule
    fitting = {"zero_optimization": {HIERARCHY_KEY: 4}}
    assert updater.with_hierarchy(fitting, config_of(zero_stage=3), 8, 1) == fitting
