"""The settings that DeepSpeed gets: ours, and for every other key the template's."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import config_of

from zerokara.errors import UserError
from zerokara.training.compute.updater import (
    HIERARCHY_KEY,
    hierarchy_fault,
    load_template,
    settings_for,
    with_hierarchy,
)

SHIPPED_TEMPLATE = Path(__file__).resolve().parents[3] / "original_codes" / "ds_config_gpt_TEMPLATE.json"


def test_our_settings_are_merged_into_the_template() -> None:
    config = config_of(zero_stage=2, precision="fp32", global_batch_size=32, micro_batch_size=8)
    settings = settings_for(config, 2, {"zero_optimization": {"overlap_comm": True}, "x": 1})
    assert settings["zero_optimization"] == {"overlap_comm": True, "stage": 2}
    assert (settings["train_batch_size"], settings["gradient_accumulation_steps"], settings["x"]) == (32, 2, 1)
    assert settings["bf16"] == {"enabled": False} and "data_types" not in settings


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gradients_are_summed_beside_the_backward_pass_on_a_gpu(stage: int, device: str) -> None:
    config = config_of(zero_stage=stage, precision="fp32")
    shipped = load_template(SHIPPED_TEMPLATE)
    found = settings_for(config, 2, shipped, device)["zero_optimization"]
    assert found["overlap_comm"] is (stage > 1 and device == "cuda")
    for stated in (True, False):
        theirs = shipped | {"zero_optimization": {"overlap_comm": stated}}
        assert settings_for(config, 2, theirs, device)["zero_optimization"]["overlap_comm"] is stated


def test_a_template_that_sets_what_the_config_owns_is_refused_with_every_key(tmp_path: Path) -> None:
    path = tmp_path / "template.json"
    path.write_text(
        '{\n  "fp16": {"enabled": true},\n  "zero_optimization": {\n    "stage": 3\n  }\n}\n', encoding="utf-8"
    )
    with pytest.raises(UserError) as caught:
        load_template(path)
    faults = {fault.key: fault for fault in caught.value.faults}
    assert {(fault.where, fault.key, str(fault.value)) for fault in faults.values()} == {
        (f"{path}:2", "fp16", "{'enabled': True}"),
        (f"{path}:2", "fp16.enabled", "True"),
        (f"{path}:4", "zero_optimization.stage", "3"),
    }
    assert "precision" in faults["fp16"].rule and "zero_stage" in faults["zero_optimization.stage"].rule


@pytest.mark.parametrize(
    ("content", "keyword"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        ('{"a": ' * 100_000, "256 kB"),
        ('{"a": ' * 20_000 + "1" + "}" * 20_000, "JSON"),
    ],
)
def test_a_template_that_is_no_json_object_is_refused(tmp_path: Path, content: str, keyword: str) -> None:
    path = tmp_path / "template.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_template(path)
    (fault,) = caught.value.faults
    assert fault.where.startswith(str(path)) and keyword in fault.rule


def test_a_template_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_template(tmp_path / "none.json")
    assert caught.value.faults[0].where == str(tmp_path / "none.json")


def test_the_shipped_template_is_accepted() -> None:
    assert "zero_optimization" in load_template(SHIPPED_TEMPLATE)


def test_over_machines_stage_3_is_hierarchical() -> None:
    template = {"zero_optimization": {"reduce_bucket_size": 5}}
    stage_3 = config_of(zero_stage=3)
    zero = with_hierarchy(template, stage_3, 16, 2)["zero_optimization"]
    assert zero == {"reduce_bucket_size": 5, HIERARCHY_KEY: 8} and HIERARCHY_KEY not in template["zero_optimization"]
    assert with_hierarchy(template, stage_3, 8, 1) == template, "one machine"
    assert with_hierarchy(template, stage_3, 2, 2) == template, "one process on each"
    assert with_hierarchy(template, config_of(zero_stage=2), 16, 2) == template
    assert with_hierarchy(template, config_of(zero_stage=3, tensor_parallel_size=2), 16, 2) == template
    stated = {"zero_optimization": {HIERARCHY_KEY: 1}}
    assert with_hierarchy(stated, stage_3, 16, 2) == stated, "the user's own"


@pytest.mark.parametrize(
    ("size", "settings", "rule"),
    [
        (3, {"zero_stage": 3}, "must be a divisor of the 8 processes"),
        ("many", {"zero_stage": 3}, "must be a divisor of the 8 processes"),
        (2, {"zero_stage": 2}, "needs zero_stage 3"),
        (2, {"zero_stage": 3, "tensor_parallel_size": 2}, "tensor_parallel_size 1"),
    ],
)
def test_a_hierarchy_of_the_users_own_must_fit(size: object, settings: dict, rule: str) -> None:
    fault = hierarchy_fault({"zero_optimization": {HIERARCHY_KEY: size}}, config_of(**settings), 8)
    assert fault and rule in fault.rule and fault.key == HIERARCHY_KEY and fault.value == size
    assert hierarchy_fault({"zero_optimization": {HIERARCHY_KEY: 4}}, config_of(zero_stage=3), 8) is None
