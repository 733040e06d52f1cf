"""What each optimizer updates, what decays, its memory, and where it can run."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import UserError
from zerokara.model.parameters import row_blocks
from zerokara.model.shapes import ModelShape
from zerokara.training.compute import optimizers, torch_optimizers

OVERRIDES = ["num_layers=2", "hidden_size=64", "num_attn_heads=4", "num_kv_heads=2", "ffn_hidden_size=96"]


def of(*overrides: str) -> tuple[PretrainConfig, ModelShape]:
    settings = load(PretrainConfig, "/dev/null", [*OVERRIDES, *overrides])
    return settings, ModelShape.from_config(settings, 500)


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "t5"])
def test_parameters_are_those_of_a_built_model(architecture: str, tied: str) -> None:
    from zerokara.model import parallel
    from zerokara.model.megatron import build

    heads = [] if architecture == "llama" else ["num_kv_heads=auto"]
    _, shape = of(f"architecture={architecture}", f"tie_word_embeddings={tied}", *heads)
    parallel.start_alone()
    built = {name: tuple(parameter.shape) for name, parameter in build(shape, seed=None).named_parameters()}
    assert shape.parameter_shapes() == built


def test_rows_of_the_matrices_in_one_parameter() -> None:
    _, shape = of()  # heads of width 16: the two of a kv head, its key, its value, twice
    queries, keys, values = row_blocks("decoder.layers.0.self_attention.linear_qkv.weight", shape)
    assert list(queries) == [*range(32), *range(64, 96)]
    assert list(keys) == [*range(32, 48), *range(96, 112)]
    assert list(values) == [*range(48, 64), *range(112, 128)]
    gate, up = row_blocks("decoder.layers.1.mlp.linear_fc1.weight", shape)
    assert list(gate) == list(range(96)) and list(up) == list(range(96, 192))
    assert row_blocks("decoder.layers.1.mlp.linear_fc2.weight", shape) == ()


def test_every_parameter_is_in_one_group_and_vectors_do_not_decay() -> None:
    for optimizer in ("adamw", "adafactor", "muon"):
        settings, shape = of(f"optimizer={optimizer}", "architecture=gpt2", "num_kv_heads=auto")
        parameters = shape.parameter_shapes()
        groups = optimizers.parameter_groups(settings, parameters)
        assert sorted(name for group in groups for name in group.names) == sorted(parameters)
        for group in groups:
            assert {len(parameters[name]) > 1 for name in group.names} == {group.weight_decay > 0}
            assert group.lr_scale == 1


def test_muon_has_the_matrices_of_the_layers_alone() -> None:
    settings, shape = of("optimizer=muon", "tie_word_embeddings=false")
    groups = {
        group.rule: group
        for group in optimizers.parameter_groups(settings, shape.parameter_shapes())
        if group.kind == "matrix"
    }
    assert set(groups["adamw"].names) == {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert len(groups["muon"].names) == 2 * 4


def test_the_plan_says_what_decays() -> None:
    assert optimizers.plan_lines(*of()) == [
        "AdamW: 9 matrices (94.2k) weight decay 0.1, 5 norms and biases (320) no decay",
    ]
    assert optimizers.plan_lines(*of("optimizer=muon", "weight_decay=0")) == [
        "AdamW: 1 matrix (32.8k) weight decay 0, 5 norms and biases (320) no decay",
        "Muon: 8 matrices (61.4k) weight decay 0",
    ]


@pytest.mark.parametrize(
    ("overrides", "times"), [((), 30), (("optimizer=adafactor",), 1), (("relative_attention_lr_multiplier=7",), 7)]
)
def test_tables_of_distances_learn_faster_and_do_not_decay(overrides: tuple[str, ...], times: float) -> None:
    settings, shape = of("architecture=t5", "num_kv_heads=auto", "weight_decay=0.1", *overrides)
    groups = optimizers.parameter_groups(settings, shape.parameter_shapes())
    tables, others = (
        [g for g in groups if "relative" in g.names[0]],
        [g for g in groups if "relative" not in g.names[0]],
    )
    assert [(len(group.names), group.weight_decay, group.lr_scale) for group in tables] == [(2, 0, times)]
    assert {group.lr_scale for group in others} == {1}
    assert not any("relative" in name for group in others for name in group.names)
    lines = "\n".join(optimizers.plan_lines(settings, shape))
    assert f"2 tables of distances (256) no decay{f', {times} times the learning rate' if times > 1 else ''}" in lines


def test_the_learning_rate_of_a_group() -> None:
    groups: list[dict[str, Any]] = [{"lr_scale": 1.0}, {"lr_scale": 30.0}]
    torch_optimizers.set_learning_rate(groups, 0.001)
    assert [group["lr"] for group in groups] == [0.001, 0.03]


def test_what_a_checkpoint_takes() -> None:
    _, shape = of()
    numbers, embedding = shape.num_parameters(), 512 * 64
    vectors = 5 * 64
    layers = numbers - embedding - vectors
    rows_and_columns = (512 + 64) + 2 * ((128 + 64) + (64 + 64) + (192 + 64) + (64 + 96))
    assert optimizers.checkpoint_bytes("adamw", shape) == 12 * numbers
    assert optimizers.checkpoint_bytes("muon", shape) == 8 * layers + 12 * (embedding + vectors)
    assert optimizers.checkpoint_bytes("adafactor", shape) == 4 * (numbers + rows_and_columns + vectors)


def test_where_whole_matrices_are_needed(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "optimizer: muon\nzero_stage: 3\noffload: all\nnum_processes: 2\ntensor_parallel_size: 2\n", "utf-8"
    )
    with pytest.raises(UserError) as caught:
        load(PretrainConfig, path)
    needs = "with optimizer: muon, which needs whole matrices"
    assert [str(fault).replace(str(tmp_path) + "/", "") for fault in caught.value.faults] == [
        f"config.yaml:2: zero_stage = 3: must be 0 or 1 {needs}: at 2 and 3 DeepSpeed cuts them anywhere; "
        "set zero_stage: 1, or optimizer: adamw",
        f"config.yaml:3: offload = all: must be none {needs}: DeepSpeed's offload moves pieces of them; "
        "set offload: none and zero_stage: 1, or optimizer: adamw",
        f"config.yaml:5: tensor_parallel_size = 2: must be 1 {needs}: tensor parallelism cuts them; "
        "set tensor_parallel_size: 1, or optimizer: adamw",
    ]


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_the_rules_allow_what_the_table_says(optimizer: str) -> None:
    for stage, tensor, offload in itertools.product(range(4), (1, 2), ("none", "optimizer", "all")):
        enough = stage >= {"none": 0, "optimizer": 1, "all": 3}[offload]
        whole = stage <= 1 and tensor == 1 and offload == "none"
        allowed = enough and (optimizer == "adamw" or whole)
        chosen = [f"optimizer={optimizer}", f"zero_stage={stage}", f"offload={offload}", "num_processes=2"]
        try:
            of(*chosen, f"tensor_parallel_size={tensor}")
        except UserError:
            assert not allowed, chosen
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
def test_what_deepspeed_is_told_of_offload(offload: str, expected: dict) -> None:
    from zerokara.training.compute.deepspeed_settings import settings_for

    settings, _ = of("zero_stage=3", f"offload={offload}", "precision=bf16")
    told = settings_for(settings, 1, {})
    assert told["zero_optimization"] == expected
    assert told["bf16"] == {"enabled": True} and told["data_types"] == {"grad_accum_dtype": "fp32"}
    assert told["zero_force_ds_cpu_optimizer"] is False  # DeepSpeedCPUAdam would be compiled
