"""What the plan says of each optimizer, the size of the state, and the settings it can run with.

tests/numerics/test_reference_training.py has which parameters it updates how.
"""

import itertools
from typing import Any

import pytest
from configs import config_of

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import UserError
from zerokara.model.shapes import ModelShape
from zerokara.training.compute import optimizers
from zerokara.training.compute.updater import settings_for

SMALL = {"hidden_size": 64, "num_kv_heads": 2, "ffn_hidden_size": 96}


def of(**overrides: Any) -> tuple[PretrainConfig, ModelShape]:
    settings = config_of(**{**SMALL, **overrides})
    return settings, ModelShape.from_config(settings, 500)


@pytest.mark.parametrize(
    ("overrides", "times"), [({}, 30), ({"optimizer": "adafactor"}, 1), ({"relative_attention_lr_multiplier": 7.0}, 7)]
)
def test_relative_position_biases_learn_faster_and_do_not_decay(overrides: dict[str, Any], times: float) -> None:
    settings, shape = of(architecture="t5", num_kv_heads="auto", weight_decay=0.1, **overrides)
    groups = optimizers.parameter_groups(settings, shape.parameter_shapes())
    biases = [group for group in groups if group.kind == "relative position bias"]
    others = [group for group in groups if group.kind != "relative position bias"]
    assert [(len(groups[group]), group.weight_decay, group.lr_scale) for group in biases] == [(2, 0, times)]
    assert {group.lr_scale for group in others} == {1}
    assert not any("relative" in name for group in others for name in groups[group])


def test_the_size_of_a_checkpoint() -> None:
    _, shape = of()
    numbers, embedding = shape.num_parameters(), 512 * 64
    vectors = 5 * 64
    layers = numbers - embedding - vectors
    rows_and_columns = (512 + 64) + 2 * ((128 + 64) + (64 + 64) + (192 + 64) + (64 + 96))
    assert optimizers.checkpoint_bytes("adamw", shape) == 12 * numbers
    assert optimizers.checkpoint_bytes("muon", shape) == 8 * layers + 12 * (embedding + vectors)
    assert optimizers.checkpoint_bytes("adafactor", shape) == 4 * (numbers + rows_and_columns + vectors)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_the_settings_allow_what_the_table_says(optimizer: str) -> None:
    for stage, tensor, offload in itertools.product(range(4), (1, 2), ("none", "optimizer", "all")):
        enough = stage >= {"none": 0, "optimizer": 1, "all": 3}[offload]
        whole = stage <= 1 and tensor == 1 and offload == "none"
        allowed = enough and (optimizer == "adamw" or whole)
        chosen = {"optimizer": optimizer, "zero_stage": stage, "offload": offload, "tensor_parallel_size": tensor}
        try:
            of(**chosen, num_processes=2)
        except UserError as error:
            assert not allowed, chosen
            if enough:  # each setting that needs parts of matrices is named
                wrong = {fault.key for fault in error.faults}
                stated = {"zero_stage": stage > 1, "tensor_parallel_size": tensor > 1, "offload": offload != "none"}
                assert wrong == {key for key, is_wrong in stated.items() if is_wrong}
                assert all("optimizer: adamw" in (fault.remedy or "") for fault in error.faults)
        else:
            assert allowed, chosen


@pytest.mark.parametrize(
    ("offload", "expected"),
    [
        ("none", {"stage": 3}),
        ("optimizer", {"stage": 3, "offload_optimizer": {"device": "cpu"}}),
        ("all", {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    ],
)
def test_offload_in_the_settings_of_deepspeed(offload: str, expected: dict) -> None:
    settings, _ = of(zero_stage=3, offload=offload, precision="bf16")
    found = settings_for(settings, 1, {})
    assert found["zero_optimization"] == expected | {"overlap_comm": False}
    assert found["bf16"] == {"enabled": True} and found["data_types"] == {"grad_accum_dtype": "fp32"}
    assert found["zero_force_ds_cpu_optimizer"] is False  # DeepSpeedCPUAdam would be compiled
