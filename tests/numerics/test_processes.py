"""The same training with any data parallelism, gradient accumulation and ZeRO stage, in fp32 and in bf16."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import rounding
import torch
from tiny import nothing_small

from zerokara.training.processes import joining


@pytest.fixture(scope="module")
def runs(train_runs: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict:
    alone = {
        "one": {"zero_stage": 0, "micro_batch_size": 8},
        "accumulated": {"zero_stage": 0, "micro_batch_size": 2},
        "accumulated_stage1": {"zero_stage": 1, "micro_batch_size": 2},
        "accumulated_stage3": {"zero_stage": 3, "micro_batch_size": 2},
        "other_batch": {"zero_stage": 0, "micro_batch_size": 4, "global_batch_size": 4, "train_tokens": 20 * 4 * 32},
    }
    in_bf16 = {"precision": "bf16", "lr": 0.002, "micro_batch_size": 4}
    alone["one_bf16"] = {"zero_stage": 0, **in_bf16}
    alone["other_batch_bf16"] = {**alone["other_batch"], **in_bf16}
    together = {f"two_stage{stage}": {"zero_stage": stage, "micro_batch_size": 2} for stage in range(4)}
    together |= {f"two_bf16_stage{stage}": {"zero_stage": stage, **in_bf16} for stage in range(4)}
    together["two_stage3"]["deepspeed_template"] = str(nothing_small(tmp_path_factory.mktemp("template")))
    together["spoilt_stage3"] = {"zero_stage": 3, "spoil_at": ["decoder.final_layernorm.weight", 3]}
    together["spoilt"] = {"zero_stage": 2, "spoil_at": ["decoder.layers.0.mlp.linear_fc1.weight", 3]}
    folder = tmp_path_factory.mktemp("hierarchical")
    template = folder / "template.json"
    pairs = {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 2000}
    template.write_text(json.dumps({"zero_optimization": pairs}), encoding="utf-8")
    hierarchical = {"zero_stage": 3, "micro_batch_size": 1, "deepspeed_template": str(template)}
    four = {"four_hierarchical": hierarchical, "four_resumed": {**hierarchical, "stop_at": 7}}
    fours = train_runs(four, processes=4, folder=folder)
    train_runs({"four_resumed": hierarchical}, processes=4, folder=folder)
    return {**train_runs(alone), **train_runs(together, processes=2), **fours}


@pytest.mark.parametrize(
    "name",
    [
        *("accumulated", "accumulated_stage1", "accumulated_stage3", "four_hierarchical"),
        *[f"two_stage{stage}" for stage in range(4)],
    ],
)
def test_equals_one_process_with_one_micro_batch(runs: dict, name: str) -> None:
    expected, got = runs["one"].losses, runs[name].losses
    assert len(expected) == 20
    assert expected[-1] < expected[0] - 0.5, "nothing was learned: equality would mean nothing"
    rounding.assert_same_curve(got, expected)


@pytest.mark.parametrize("name", ["four_hierarchical", *[f"two_stage{stage}" for stage in range(4)]])
def test_final_weights_are_those_of_one_process(runs: dict, name: str) -> None:
    rounding.assert_same_weights(runs[name].weights, runs["one"].weights, at_step=20)


def test_hierarchical_partitioning_resumes_bit_for_bit(runs: dict) -> None:
    """Copies of the weights before the checkpoint's would show in the first step."""
    whole, resumed = runs["four_hierarchical"], runs["four_resumed"]
    assert resumed.losses == whole.losses
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())


@pytest.mark.parametrize(("suffix", "precision"), [("", "fp32"), ("_bf16", "bf16")])
def test_another_global_batch_is_another_training(runs: dict, suffix: str, precision: str) -> None:
    """The broken twin: half of each batch is missing, as if a rank's gradients reached no other."""
    wrong, right = runs[f"other_batch{suffix}"], runs[f"one{suffix}"]
    assert rounding.times_tolerance(wrong.losses, right.losses, precision=precision) > rounding.BROKEN
    assert rounding.times_tolerance(wrong.grad_norms, right.grad_norms, quantity="grad_norm") > rounding.BROKEN
    assert rounding.weights_times_tolerance(wrong.weights, right.weights, at_step=20) > rounding.BROKEN


@pytest.mark.parametrize("stage", range(4))
def test_every_stage_gives_the_same_curve_in_bf16(runs: dict, stage: int) -> None:
    expected = runs["one_bf16"].losses
    assert len(expected) == 20 and expected[-1] < expected[0] - 0.3
    rounding.assert_same_curve(runs[f"two_bf16_stage{stage}"].losses, expected, precision="bf16")


@pytest.mark.parametrize("prefix", ["two", "two_bf16"])
def test_from_stage_1_on_a_rank_holds_half_of_the_optimizer_state(runs: dict, prefix: str) -> None:
    numbers = sum(weight.numel() for weight in runs["one"].weights.values())
    whole = 2 * 4 * numbers  # first and second moments, fp32
    for stage in range(4):
        held = [runs[f"{prefix}_stage{stage}"].optimizer_bytes(rank) for rank in range(2)]
        share = 1 if stage == 0 else 2
        # Partitions are padded to equal size, and each tensor has a step count.
        assert held == pytest.approx([whole / share] * 2, rel=0.01), f"stage {stage}"


@pytest.mark.parametrize(
    ("name", "weight"),
    [("spoilt", "decoder.layers.0.mlp.linear_fc1.weight"), ("spoilt_stage3", "decoder.final_layernorm.weight")],
)
def test_weights_that_diverged_stop_the_run(runs: dict, name: str, weight: str) -> None:
    """The broken twin of every run here, all of whose weights were compared after every step."""
    message = (runs[name].folder / "spoilt.txt").read_text(encoding="utf-8")
    for part in ("steps 3 to 3", "process 0", "process 1", weight):
        assert part in message
    assert not (runs[name].folder / "latest").exists()


def test_no_other_machine_can_connect(runs: dict) -> None:
    """The processes listen on the loopback address alone."""
    for name in ("one", "two_stage1", "two_stage3"):
        for path in runs[name].folder.glob("listening_*.json"):
            assert set(json.loads(path.read_text(encoding="utf-8"))) == {"127.0.0.1"}


@pytest.mark.parametrize("stage", range(4))
def test_every_process_group_waits_as_long(runs: dict, stage: int) -> None:
    """Those that torch, megatron-core and DeepSpeed make; run_sessions.py gives them another time-out by default."""
    found = [json.loads(path.read_text()) for path in runs[f"two_stage{stage}"].folder.glob("timeouts_*.json")]
    assert len(found) == 2
    for timeouts in found:
        assert len(timeouts) > 1 and set(timeouts) == {joining.TIMEOUT.total_seconds()}
