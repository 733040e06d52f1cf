"""The same training with any data and tensor parallelism, gradient accumulation, ZeRO stage and recomputation."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import rounding
import torch
from tiny import nothing_small

from zerokara.training.processes import joining

SLOWER = {"zero_stage": 0, "lr": 0.003, "micro_batch_size": 8}
"""At a lower learning rate than the other runs', which has loss spikes here: they amplify a last digit."""
BF16 = {"precision": "bf16", "lr": 0.002, "micro_batch_size": 4}
WATCHED = {"sample_prompts": "[ab, cde]", "sample_tokens": 5, "eval_interval": 10}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SLOWER, **WATCHED},
    "qwen3": {**SLOWER, "architecture": "qwen3", "tie_word_embeddings": "false"},
    "gpt2": {**SLOWER, "architecture": "gpt2", "num_kv_heads": "auto", "tie_word_embeddings": "false"},
}
MASKED = {"lr": 0.003, "intra_document_masking": True}
ALONE: dict[str, dict[str, Any]] = {
    **FAMILIES,
    "one": {"zero_stage": 0, "micro_batch_size": 8},
    "accumulated": {"zero_stage": 0, "micro_batch_size": 2},
    "accumulated_stage3": {"zero_stage": 3, "micro_batch_size": 2},
    "other_batch": {"zero_stage": 0, "micro_batch_size": 4, "global_batch_size": 4, "train_tokens": 20 * 4 * 32},
    "one_bf16": {"zero_stage": 0, **BF16},
    "masked": {**MASKED, "zero_stage": 0},
    "from_one": {**SLOWER, "stop_at": 10},
}
TENSORS = {"tensor_parallel_size": 2}
SHORT = {"train_tokens": 6 * 8 * 32}
TOGETHER: dict[str, dict[str, Any]] = {
    **{f"two_stage{stage}": {"zero_stage": stage, "micro_batch_size": 2} for stage in range(4)},
    **{f"two_bf16_stage{stage}": {"zero_stage": stage, **BF16} for stage in range(4)},
    "masked_two": {**MASKED, "zero_stage": 3},
    "llama_tensors0": {**FAMILIES["llama"], **TENSORS},
    "llama_tensors3": {**FAMILIES["llama"], **TENSORS, "zero_stage": 3},
    "qwen3_tensors": {**FAMILIES["qwen3"], **TENSORS, "zero_stage": 2},
    "gpt2_tensors": {**FAMILIES["gpt2"], **TENSORS, "zero_stage": 1},
    "from_one": {**SLOWER, **TENSORS, "zero_stage": 1},
    "from_two": {**SLOWER, **TENSORS, "zero_stage": 1, "stop_at": 10},
    # The folder of "from_two" once more, the two processes now data-parallel.
    "from_two_again": {**SLOWER, "zero_stage": 2, "micro_batch_size": 4, "output_model_dir": "from_two"},
    **{f"recomputed_{mode}": {**SHORT, "zero_stage": 3, "activation_checkpointing": mode} for mode in ("off", "full")},
    **{f"recomputed_tensors_{mode}": {**SHORT, **TENSORS, "intra_document_masking": True,
       "activation_checkpointing": mode} for mode in ("off", "selective")},
    "spoilt": {"zero_stage": 2, "spoil_at": ["decoder.layers.0.mlp.linear_fc1.weight", 3]},
    "spoilt_stage3": {"zero_stage": 3, "spoil_at": ["decoder.final_layernorm.weight", 3]},
    "spoilt_tensors": {**TENSORS, "spoil_at": ["decoder.layers.1.pre_mlp_layernorm.weight", 3]},
}  # fmt: skip
EQUAL = {
    **dict.fromkeys(("accumulated", "accumulated_stage3", "four", *(f"two_stage{stage}" for stage in range(4))), "one"),
    "masked_two": "masked",
    **{name: name.split("_")[0] for name in TOGETHER if "_tensors" in name and name.split("_")[0] in FAMILIES},
    **dict.fromkeys(("from_one", "from_two"), "llama"),
}
"""Runs that share the work out otherwise, and the run that they equal."""


@pytest.fixture(scope="module")
def runs(train_runs: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("processes")
    found = train_runs(ALONE, folder=folder)
    together = {name: dict(settings) for name, settings in TOGETHER.items()}
    for name in ("two_stage3", "llama_tensors3"):
        together[name]["deepspeed_template"] = str(nothing_small(folder))
    together["from_two_again"]["output_model_dir"] = str(folder / "from_two")
    template = folder / "hierarchical.json"
    pairs = {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 2000}
    template.write_text(json.dumps({"zero_optimization": pairs}), encoding="utf-8")
    hierarchical = {"zero_stage": 3, "micro_batch_size": 1, "deepspeed_template": str(template)}
    fours = {"four": hierarchical, "four_resumed": {**hierarchical, "stop_at": 7}}
    found |= train_runs(together, processes=2, folder=folder) | train_runs(fours, processes=4, folder=folder)
    return found | train_runs({"four_resumed": hierarchical}, processes=4, folder=folder)


@pytest.mark.parametrize("name", EQUAL)
def test_it_equals_one_process(runs: dict, name: str) -> None:
    one, found = runs[EQUAL[name]], runs[name]
    assert len(one.losses) == 20
    assert one.losses[-1] < one.losses[0] - 0.5, "nothing was learned: equality would mean nothing"
    rounding.assert_same_curve(found.losses, one.losses)
    rounding.assert_same_weights(found.weights, one.weights, at_step=20)
    if "_tensors" in name:  # replicated parameters count once in the gradient norm
        rounding.assert_same_curve(found.grad_norms, one.grad_norms, quantity="grad_norm")


@pytest.mark.parametrize("stage", range(4))
def test_every_stage_gives_the_same_curve_in_bf16(runs: dict, stage: int) -> None:
    expected = runs["one_bf16"].losses
    assert len(expected) == 20 and expected[-1] < expected[0] - 0.3
    rounding.assert_same_curve(runs[f"two_bf16_stage{stage}"].losses, expected, precision="bf16")


def test_another_global_batch_is_another_training_and_so_is_masking(runs: dict) -> None:
    """The broken twins: half of each batch is missing, as if a rank's gradients reached no other; or the masks are."""
    wrong, right = runs["other_batch"], runs["one"]
    assert rounding.times_tolerance(wrong.losses, right.losses) > rounding.BROKEN
    assert rounding.times_tolerance(wrong.grad_norms, right.grad_norms, quantity="grad_norm") > rounding.BROKEN
    assert rounding.weights_times_tolerance(wrong.weights, right.weights, at_step=20) > rounding.BROKEN
    assert rounding.times_tolerance(runs["masked"].losses, runs["llama"].losses) > rounding.BROKEN


def test_recomputation_changes_no_bit(runs: dict) -> None:
    """Under the hooks of ZeRO 3, and with tensor parallelism and intra-document masking."""
    for prefix, mode in (("recomputed", "full"), ("recomputed_tensors", "selective")):
        off = runs[f"{prefix}_off"].losses
        assert len(off) == 6 and off[-1] < off[0] and runs[f"{prefix}_{mode}"].losses == off


def test_hierarchical_partitioning_resumes_bit_for_bit(runs: dict) -> None:
    """Copies of the weights before the checkpoint's would show in the first step."""
    assert runs["four_resumed"].losses == runs["four"].losses
    weights = runs["four_resumed"].weights
    assert all(torch.equal(weights[name], weight) for name, weight in runs["four"].weights.items())


@pytest.mark.parametrize("stage", [0, 3])
def test_validation_and_samples_are_those_of_one_process(runs: dict, stage: int) -> None:
    one, two = runs["llama"], runs[f"llama_tensors{stage}"]
    assert len(one.valid_losses) == 3
    rounding.assert_same_curve(two.valid_losses, one.valid_losses, at_step=20)
    samples = [(run.folder / "samples.md").read_text(encoding="utf-8") for run in (one, two)]
    assert samples[0].count("sampled:") == 2 * 3 and samples[1] == samples[0]


@pytest.mark.parametrize("prefix", ["two", "two_bf16"])
def test_from_stage_1_on_a_rank_holds_half_of_the_optimizer_state(runs: dict, prefix: str) -> None:
    numbers = sum(weight.numel() for weight in runs["one"].weights.values())
    whole = 2 * 4 * numbers  # first and second moments, fp32
    for stage in range(4):
        sizes = [runs[f"{prefix}_stage{stage}"].optimizer_bytes(rank) for rank in range(2)]
        share = 1 if stage == 0 else 2
        # Partitions are padded to equal size, and each tensor has a step count.
        assert sizes == pytest.approx([whole / share] * 2, rel=0.01), f"stage {stage}"


@pytest.mark.parametrize("name", ["spoilt", "spoilt_stage3", "spoilt_tensors"])
def test_weights_that_diverged_stop_the_run(runs: dict, name: str) -> None:
    """The broken twin of every run here, all of whose weights were compared after every step."""
    message = (runs[name].folder / "spoilt.txt").read_text(encoding="utf-8")
    for part in ("steps 3 to 3", "process 0", "process 1", TOGETHER[name]["spoil_at"][0]):
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
