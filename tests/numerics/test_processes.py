"""The same training with any data and tensor parallelism, gradient accumulation, ZeRO stage and recomputation.

In every family, and resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rounding
from tiny import T5, assert_same_bits

from zerokara.training.monitoring import step_metrics
from zerokara.training.processes import joining

STEPS, STOP_AT = 8, 5
SLOWER = {"lr": 0.003, "micro_batch_size": 8}
"""At a lower learning rate than the other runs', which has loss spikes here: they amplify a last digit."""
WATCHED = {"sample_prompts": "[ab, cde]", "sample_tokens": 3, "eval_interval": 4}
SENTINEL = "cde <extra_id_0> f"
MOE = {"num_experts": 4, "moe_layers": "[1]", "router_aux_loss_coef": 0.02, "router_z_loss_coef": 0.001}
MASKED = {"lr": 0.003, "intra_document_masking": True}
SPANS = {**WATCHED, "zero_stage": 1, "sample_prompts": f"[ab, {SENTINEL}]", "lr": 0.003}
ALONE: dict[str, dict[str, Any]] = {
    "llama": {**SLOWER, **WATCHED},
    "qwen3": {**SLOWER, "architecture": "qwen3", "tie_word_embeddings": "false"},
    "qwen2": {**SLOWER, "architecture": "qwen2"},
    "gpt2": {**SLOWER, "architecture": "gpt2", "num_kv_heads": "auto", "tie_word_embeddings": "false"},
    "olmo2": {"architecture": "olmo2", "tie_word_embeddings": "false", "lr": 0.003},
    "mixtral": {**MOE, "architecture": "mixtral", "moe_layers": "auto"},
    "t5": {**SPANS, **T5, "tie_word_embeddings": "true"},
    "switch": {**SPANS, **T5, **MOE, "architecture": "switch", "optimizer": "muon"},
    "one": {"micro_batch_size": 8},
    "one_accumulated": {"micro_batch_size": 2},
    "masked": MASKED,
    "from_one": {**SLOWER, "stop_at": STOP_AT},
    "switch_resumed": {},
}
TENSORS = {"tensor_parallel_size": 2}
TOGETHER: dict[str, dict[str, Any]] = {
    **{f"one_stage{stage}": {"zero_stage": stage, "micro_batch_size": 2} for stage in (1, 3)},
    "masked_stage3": {**MASKED, "zero_stage": 3},
    "masked_tensors": {**MASKED, **TENSORS},
    **{f"{name}_tensors": {**ALONE[name], **TENSORS} for name in ("llama", "qwen3", "qwen2", "olmo2", "gpt2", "t5")},
    "from_one": {**SLOWER, **TENSORS},
    "from_two": {**SLOWER, **TENSORS, "stop_at": STOP_AT},
    # The folder of "from_two" once more, the two processes now data-parallel.
    "from_two_again": {**SLOWER, "zero_stage": 2, "micro_batch_size": 4, "output_model_dir": "from_two"},
    "switch_two": ALONE["switch"],
    "mixtral_two": {**ALONE["mixtral"], "zero_stage": 3},
    "recomputed_stage3": {"zero_stage": 3, "micro_batch_size": 2, "activation_checkpointing": "full"},
    "recomputed_tensors": {**MASKED, **TENSORS, "activation_checkpointing": "selective"},
    "spoilt_tensors": {**TENSORS, "spoil_at": ["decoder.layers.1.pre_mlp_layernorm.weight", 3]},
}
RECOMPUTED = {"recomputed_stage3": "one_stage3", "recomputed_tensors": "masked_tensors"}
EQUAL = {
    **{name: name.partition("_")[0] for name in [*ALONE, *TOGETHER]
       if name.partition("_")[0] in ALONE and name.partition("_")[2] not in ("", "resumed")},
    **dict.fromkeys(("from_one", "from_two"), "llama"),
    "four": "one",
}  # fmt: skip
"""Runs that share the work out otherwise, and the run that they equal."""
SOONEST = ("llama", "one", "masked", "recomputed", "spoilt")
"""First words of the runs that are tried soonest; the others take minutes together, and are for CI."""


def is_soonest(name: str) -> bool:
    return name.partition("_")[0] in SOONEST


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def complete(span_data: dict[str, str], folder: Path) -> Callable[..., dict[str, Any]]:
    spans = {key: span_data[key] for key in ("input_tokenizer_file", "output_prefix")}

    def complete(name: str, settings: dict[str, Any]) -> dict[str, Any]:
        further = spans if SENTINEL in settings.get("sample_prompts", "") else {}
        again = {"output_model_dir": str(folder / "from_two")} if name == "from_two_again" else {}
        return {"train_tokens": STEPS * 8 * 32, **settings, **further, **again}

    return complete


@pytest.fixture(scope="module")
def soonest(train_runs: Callable, complete: Callable, folder: Path) -> dict:
    alone, together = (
        {name: complete(name, each) for name, each in table.items() if is_soonest(name)} for table in (ALONE, TOGETHER)
    )
    return train_runs(alone, folder=folder) | train_runs(together, processes=2, folder=folder)


@pytest.fixture(scope="module")
def runs(train_runs: Callable, complete: Callable, folder: Path, soonest: dict) -> dict:
    alone, together = (
        {name: complete(name, each) for name, each in table.items() if not is_soonest(name)}
        for table in (ALONE, TOGETHER)
    )
    alone["switch_resumed"] = {**alone["switch"], "stop_at": STOP_AT}
    template = folder / "hierarchical.json"
    pairs = {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 2000}
    template.write_text(json.dumps({"zero_optimization": pairs}), encoding="utf-8")
    four = complete("four", {"zero_stage": 3, "micro_batch_size": 2, "deepspeed_template": str(template)})
    found = soonest | train_runs(alone, folder=folder) | train_runs(together, processes=2, folder=folder)
    found |= train_runs({"four": four, "four_resumed": {**four, "stop_at": STOP_AT}}, processes=4, folder=folder)
    assert {"switch_resumed", "four_resumed"} <= found.keys(), "they would begin anew"
    train_runs({"switch_resumed": alone["switch"]}, folder=folder)
    train_runs({"four_resumed": four}, processes=4, folder=folder)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if is_soonest(name) else [pytest.mark.slow]) for name in EQUAL]
)
def test_it_equals_one_process(request: pytest.FixtureRequest, name: str) -> None:
    runs = request.getfixturevalue("soonest" if is_soonest(name) else "runs")
    one, found = runs[EQUAL[name]], runs[name]
    # With span corruption a sample takes more raw tokens than the encoder input has.
    assert len(one.losses) in (STEPS - 1, STEPS)
    least = 0.05 if EQUAL[name] == "t5" else 0.2  # a tied T5 begins slowly
    assert one.losses[0] - one.losses[-1] > least, "nothing was learned: equality would mean nothing"
    rounding.assert_same_curve(found.losses, one.losses)
    rounding.assert_same_weights(found.weights, one.weights, at_step=len(one.losses))
    # Replicated parameters count once in the gradient norm.
    rounding.assert_same_curve(found.grad_norms, one.grad_norms, quantity="grad_norm")
    if "eval_interval" in (ALONE | TOGETHER).get(name, {}):
        assert len(one.valid_losses) == 3
        rounding.assert_same_curve(found.valid_losses, one.valid_losses, at_step=len(one.losses))


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputation_changes_no_bit(soonest: dict, name: str) -> None:
    """Under the hooks of ZeRO 3, and with tensor parallelism and intra-document masking."""
    assert soonest[name].losses == soonest[RECOMPUTED[name]].losses


@pytest.mark.slow
@pytest.mark.parametrize("name", ["four", "switch"])
def test_it_resumes_bit_for_bit(runs: dict, name: str) -> None:
    """With hierarchical partitioning, copies of the weights before the checkpoint's would show in the first step."""
    assert_same_bits(runs[f"{name}_resumed"], runs[name])


def test_samples_are_those_of_one_process(soonest: dict) -> None:
    samples = [(soonest[each].folder / "samples.md").read_text(encoding="utf-8") for each in ("llama", "llama_tensors")]
    assert samples[0].count("sampled:") == 2 * 2 and samples[1] == samples[0]


def test_copies_that_diverged_stop_the_run(soonest: dict) -> None:
    """The broken twin of every tensor-parallel run here, whose copies were compared after every step."""
    message = (soonest["spoilt_tensors"].folder / "spoilt.txt").read_text(encoding="utf-8")
    assert "steps 3 to 3" in message and TOGETHER["spoilt_tensors"]["spoil_at"][0] in message
    assert not (soonest["spoilt_tensors"].folder / "latest").exists()


def test_no_other_machine_can_connect(soonest: dict) -> None:
    """The processes listen on the loopback address alone."""
    for name in ("one", "one_stage1", "one_stage3"):
        for seen in soonest[name].seen:
            assert set(seen["listening"]) == {"127.0.0.1"}


@pytest.mark.parametrize("name", ["one_stage1", "one_stage3"])
def test_every_process_group_waits_as_long(soonest: dict, name: str) -> None:
    """Those that torch, megatron-core and DeepSpeed make; run_sessions.py gives them another time-out by default."""
    assert len(soonest[name].seen) == 2
    for seen in soonest[name].seen:
        assert len(seen["timeouts"]) > 1 and set(seen["timeouts"]) == {joining.TIMEOUT.total_seconds()}


@pytest.mark.slow
def test_prompts_with_sentinels_are_filled_during_training(runs: dict) -> None:
    samples = (runs["t5"].folder / "samples.md").read_text(encoding="utf-8")
    assert SENTINEL in samples and samples.count("sampled:") == 2 * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["switch_two", "mixtral_two"])
def test_router_statistics_are_those_of_both_processes(runs: dict, name: str) -> None:
    one = next(line for line in step_metrics.read(runs[name.split("_")[0]].folder) if "expert_load" in line)
    two = next(line for line in step_metrics.read(runs[name].folder) if "expert_load" in line)
    rounding.assert_same_curve(two["expert_load"], one["expert_load"], at_step=1)
    rounding.assert_same_curve(two["router_entropy"], one["router_entropy"], at_step=1)
    assert len(two["expert_dropped"]) == len(two["expert_load"]) == 2, "layers with experts"
    assert not any("expert_load" in line for line in step_metrics.read(runs["t5"].folder))
