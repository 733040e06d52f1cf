"""What the plan says of each optimizer, the size of the state, and the settings it can run with.

tests/numerics/test_reference_training.py has which parameters it updates how.
"""

from typing import Any

import pytest
from configs import config_of, fault_of

from zerokara.base.errors import UserError
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model.shapes import ModelShape
from zerokara.training.compute import optimizer_rules

SMALL = {"hidden_size": 64, "num_kv_heads": 2, "ffn_hidden_size": 96}


def of(**overrides: Any) -> tuple[PretrainConfig, ModelShape]:
    settings = config_of(**{**SMALL, **overrides})
    return settings, ModelShape.from_config(settings, 500)


@pytest.mark.parametrize(
    ("overrides", "times"), [({}, 30), ({"optimizer": "adafactor"}, 1), ({"relative_attention_lr_multiplier": 7.0}, 7)]
)
def test_relative_position_biases_learn_faster_and_do_not_decay(overrides: dict[str, Any], times: float) -> None:
    settings, shape = of(architecture="t5", num_kv_heads="auto", weight_decay=0.1, **overrides)
    groups = optimizer_rules.parameter_groups(settings, shape.parameter_shapes())
    found = {name: group for group, names in groups.items() for name in names}
    biases = [group for name, group in found.items() if "relative" in name]
    assert [(group.weight_decay, group.lr_scale) for group in biases] == [(0, times)] * 2
    assert {group.lr_scale for name, group in found.items() if "relative" not in name} == {1}


def test_the_size_of_a_checkpoint() -> None:
    _, shape = of()
    numbers, embedding = shape.num_parameters(), 512 * 64
    vectors = 5 * 64
    layers = numbers - embedding - vectors
    rows_and_columns = (512 + 64) + 2 * ((128 + 64) + (64 + 64) + (192 + 64) + (64 + 96))
    assert optimizer_rules.checkpoint_bytes("adamw", shape) == 12 * numbers
    assert optimizer_rules.checkpoint_bytes("muon", shape) == 8 * layers + 12 * (embedding + vectors)
    assert optimizer_rules.checkpoint_bytes("adafactor", shape) == 4 * (numbers + rows_and_columns + vectors)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
@pytest.mark.parametrize("wrong", [{"tensor_parallel_size": 2}, {"offload": "optimizer"}, {"offload": "all"}])
def test_the_settings_allow_what_the_table_says(optimizer: str, wrong: dict[str, Any]) -> None:
    chosen = {"optimizer": optimizer, "num_processes": 2, **wrong}
    if optimizer == "adamw":
        of(**chosen)
    else:  # each setting that needs parts of matrices is named
        fault = fault_of(of, **chosen)
        assert {fault.key} == {*wrong} and "optimizer: adamw" in (fault.remedy or "")
    with pytest.raises(UserError, match="needs zero_stage 3 or more"):
        of(offload="all", zero_stage=2)
