"""Encoder-decoders and experts in real training processes: alone, in parallel, resumed; the same losses each time.

Dense decoders have tests of their own for each of these; here every other family goes through all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import rounding
import torch
from tiny import T5, nothing_small

from zerokara.model.shapes import ModelShape
from zerokara.training.monitoring import step_metrics

MOE = {"num_experts": 4, "moe_layers": "[1]", "router_aux_loss_coef": 0.02, "router_z_loss_coef": 0.001}
FAMILIES = {
    "t5": {**T5, "optimizer": "adafactor", "zero_stage": 0, "lr_schedule": "inverse_sqrt", "weight_decay": 0},
    "switch": {**T5, **MOE, "architecture": "switch", "optimizer": "muon", "lr": 0.003},
    "t5_moe": {**T5, **MOE, "architecture": "t5_moe", "expert_capacity_factor": 1.0},
    "mixtral": {**MOE, "architecture": "mixtral", "moe_layers": "auto"},
    "qwen3_moe": {**MOE, "architecture": "qwen3_moe", "moe_ffn_hidden_size": 32, "expert_capacity_factor": 1.25},
}
OTHER_MICRO_BATCHES = ["t5", "switch", "qwen3_moe"]
WATCHED = {
    "sample_prompts": "[ab, cde <extra_id_0> f]",
    "sample_tokens": 3,
    "eval_interval": 6,
    "train_tokens": 12 * 8 * 32,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def runs(train_runs: Callable, span_data: dict[str, str], folder: Path) -> dict:
    """Each family: alone; stopped and resumed; with another micro batch; with two processes."""
    data = {key: span_data[key] for key in ("input_tokenizer_file", "output_prefix")}
    plain = {name: {"zero_stage": 1, **data, **WATCHED, **settings} for name, settings in FAMILIES.items()}
    plain["t5_tied"] = {**plain["t5"], "optimizer": "adamw", "tie_word_embeddings": "true", "lr": 0.003}
    first = {
        **plain,
        **{f"{name}_resumed": {**settings, "stop_at": 7} for name, settings in plain.items()},
        **{f"{name}_micro": {**plain[name], "micro_batch_size": 8} for name in OTHER_MICRO_BATCHES},
        "t5_full": {**plain["t5"], "activation_checkpointing": "full"},
        "mixtral_full": {**plain["mixtral"], "activation_checkpointing": "full"},
    }
    found = train_runs(first, folder=folder)
    found |= train_runs({f"{name}_resumed": settings for name, settings in plain.items()}, folder=folder)
    template = {"deepspeed_template": str(nothing_small(folder))}
    shared = {
        "t5_tied_2": {**plain["t5_tied"], "zero_stage": 2},
        "t5_tied_tp": {**plain["t5_tied"], "tensor_parallel_size": 2},
        "switch_two": plain["switch"],
        "t5_moe_2": {**plain["t5_moe"], "zero_stage": 2},
        "mixtral_3": {**plain["mixtral"], "zero_stage": 3, **template},
        "qwen3_moe_3_full": {
            **plain["qwen3_moe"], "zero_stage": 3, "activation_checkpointing": "full", **template
        },
    }  # fmt: skip
    return {**found, **train_runs(shared, processes=2, folder=folder)}


@pytest.mark.parametrize("name", FAMILIES)
def test_it_learns_and_resumes_bit_for_bit(runs: dict, name: str) -> None:
    unresumed, resumed = runs[name], runs[f"{name}_resumed"]
    # With span corruption a sample takes more raw tokens than the encoder input has.
    assert len(unresumed.losses) in (11, 12) and unresumed.losses[-1] < unresumed.losses[0] - 0.3
    assert resumed.losses == unresumed.losses and resumed.valid_losses == unresumed.valid_losses
    for key, weight in unresumed.weights.items():
        assert torch.equal(resumed.weights[key], weight), key
    for key, moment in unresumed.moments.items():
        assert torch.equal(resumed.moments[key], moment), key


@pytest.mark.parametrize("name", OTHER_MICRO_BATCHES)
def test_the_micro_batch_changes_nothing(runs: dict, name: str) -> None:
    rounding.assert_same_curve(runs[f"{name}_micro"].losses, runs[name].losses)
    rounding.assert_same_curve(runs[f"{name}_micro"].valid_losses, runs[name].valid_losses, at_step=12)


@pytest.mark.parametrize(
    ("name", "one"),
    [
        ("t5_tied_2", "t5_tied"), ("t5_tied_tp", "t5_tied"), ("switch_two", "switch"),
        ("t5_moe_2", "t5_moe"), ("mixtral_3", "mixtral"), ("qwen3_moe_3_full", "qwen3_moe"),
        ("t5_full", "t5"), ("mixtral_full", "mixtral"),
    ],
)  # fmt: skip
def test_two_processes_and_recomputation_equal_one(runs: dict, name: str, one: str) -> None:
    rounding.assert_same_curve(runs[name].losses, runs[one].losses)
    rounding.assert_same_curve(runs[name].grad_norms, runs[one].grad_norms, quantity="grad_norm")
    rounding.assert_same_curve(runs[name].valid_losses, runs[one].valid_losses, at_step=12)
    rounding.assert_same_weights(runs[name].weights, runs[one].weights, at_step=12)


def test_prompts_with_sentinels_are_filled_during_training(runs: dict) -> None:
    samples = (runs["t5"].folder / "samples.md").read_text(encoding="utf-8")
    assert "cde <extra_id_0> f" in samples and samples.count("sampled:") == 2 * 3


@pytest.mark.parametrize("name", ["switch", "t5_moe", "mixtral", "qwen3_moe"])
def test_router_statistics_have_a_value_for_each_layer(runs: dict, name: str) -> None:
    lines = [line for line in step_metrics.read(runs[name].folder) if "loss" in line]
    shape = ModelShape.from_json(runs[name].state.shape)
    number = len(shape.moe_layers) * (2 if shape.traits.is_encoder_decoder else 1)
    for line in lines:
        assert {len(line[key]) for key in ("expert_load", "expert_dropped", "router_entropy")} == {number}
        assert all(1 <= load <= 4 for load in line["expert_load"])
    dropped = [share for line in lines for share in line["expert_dropped"]]
    assert (max(dropped) > 0) is ("expert_capacity_factor" in FAMILIES[name]) and min(dropped) >= 0
    assert not any("expert_load" in line for line in step_metrics.read(runs["t5"].folder))


@pytest.mark.parametrize("name", ["switch_two", "mixtral_3"])
def test_router_statistics_are_those_of_both_processes(runs: dict, name: str) -> None:
    one = next(line for line in step_metrics.read(runs[name.split("_")[0]].folder) if "expert_load" in line)
    two = next(line for line in step_metrics.read(runs[name].folder) if "expert_load" in line)
    rounding.assert_same_curve(two["expert_load"], one["expert_load"], at_step=1)
    rounding.assert_same_curve(two["router_entropy"], one["router_entropy"], at_step=1)
