"""The same training with any data and tensor parallelism, gradient accumulation, ZeRO stage and recomputation.

In every family, and resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import rounding
from tiny import T5, assert_same_bits

from zerokara.training.monitoring import step_metrics
from zerokara.training.processes import joining

SLOWER = {"lr": 0.003, "micro_batch_size": 8}
"""At a lower learning rate than the other runs', which has loss spikes here: they amplify a last digit."""
WATCHED = {"sample_prompts": "[ab, cde]", "sample_tokens": 5, "eval_interval": 10}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SLOWER, **WATCHED},
    "qwen3": {**SLOWER, "architecture": "qwen3", "tie_word_embeddings": "false"},
    "qwen2": {**SLOWER, "architecture": "qwen2"},
    "gpt2": {**SLOWER, "architecture": "gpt2", "num_kv_heads": "auto", "tie_word_embeddings": "false"},
}
MOE = {"num_experts": 4, "moe_layers": "[1]", "router_aux_loss_coef": 0.02, "router_z_loss_coef": 0.001}
OTHERS: dict[str, dict[str, Any]] = {
    "t5": {**T5, "optimizer": "adafactor", "lr_schedule": "inverse_sqrt", "weight_decay": 0},
    "switch": {**T5, **MOE, "architecture": "switch", "optimizer": "muon", "lr": 0.003},
    "olmo2": {"architecture": "olmo2", "tie_word_embeddings": "false", "lr": 0.003},
    "mixtral": {**MOE, "architecture": "mixtral", "moe_layers": "auto"},
}
"""Encoder-decoders, experts, norms of outputs."""
SENTINEL = "cde <extra_id_0> f"
SHORT_WATCHED = {
    "zero_stage": 1, "sample_prompts": f"[ab, {SENTINEL}]", "sample_tokens": 3, "eval_interval": 6,
    "train_tokens": 12 * 8 * 32,
}  # fmt: skip
OTHERS = {name: SHORT_WATCHED | settings for name, settings in OTHERS.items()}
T5_TIED = {**OTHERS["t5"], "optimizer": "adamw", "tie_word_embeddings": "true", "lr": 0.003}
MASKED = {"lr": 0.003, "intra_document_masking": True}
ALONE: dict[str, dict[str, Any]] = {
    **FAMILIES,
    "one": {"micro_batch_size": 8},
    "accumulated": {"micro_batch_size": 2},
    "masked": MASKED,
    "from_one": {**SLOWER, "stop_at": 10},
    **OTHERS,
    "t5tied": T5_TIED,
}
TENSORS = {"tensor_parallel_size": 2}
SHORT = {"train_tokens": 6 * 8 * 32}
TOGETHER: dict[str, dict[str, Any]] = {
    **{f"two_stage{stage}": {"zero_stage": stage, "micro_batch_size": 2} for stage in (1, 2, 3)},
    "masked_two": {**MASKED, "zero_stage": 3},
    "llama_tensors": {**FAMILIES["llama"], **TENSORS},
    "qwen3_tensors": {**FAMILIES["qwen3"], **TENSORS},
    "qwen2_tensors": {**FAMILIES["qwen2"], **TENSORS},
    "olmo2_tensors": {**OTHERS["olmo2"], **TENSORS},
    "gpt2_tensors": {**FAMILIES["gpt2"], **TENSORS},
    "from_one": {**SLOWER, **TENSORS},
    "from_two": {**SLOWER, **TENSORS, "stop_at": 10},
    # The folder of "from_two" once more, the two processes now data-parallel.
    "from_two_again": {**SLOWER, "zero_stage": 2, "micro_batch_size": 4, "output_model_dir": "from_two"},
    "t5tied_tensors": {**T5_TIED, **TENSORS},
    "switch_two": OTHERS["switch"],
    "mixtral_two": {**OTHERS["mixtral"], "zero_stage": 3},
    **{f"recomputed_{mode}": {**SHORT, "zero_stage": 3, "activation_checkpointing": mode} for mode in ("off", "full")},
    **{f"recomputed_tensors_{mode}": {**SHORT, **TENSORS, "intra_document_masking": True,
       "activation_checkpointing": mode} for mode in ("off", "selective")},
    "spoilt": {"spoil_at": ["decoder.layers.0.mlp.linear_fc1.weight", 3]},
    "spoilt_stage3": {"zero_stage": 3, "spoil_at": ["decoder.final_layernorm.weight", 3]},
    "spoilt_tensors": {**TENSORS, "spoil_at": ["decoder.layers.1.pre_mlp_layernorm.weight", 3]},
}  # fmt: skip
ONES = (*FAMILIES, *OTHERS, "t5tied")
EQUAL = {
    **dict.fromkeys(("accumulated", "four", *(f"two_stage{stage}" for stage in (1, 2, 3))), "one"),
    "masked_two": "masked",
    **{
        name: name.rpartition("_")[0]
        for name in ALONE | TOGETHER
        if name not in ONES and name.rpartition("_")[0] in ONES
    },
    **dict.fromkeys(("from_one", "from_two"), "llama"),
}
"""Runs that share the work out otherwise, and the run that they equal."""


@pytest.fixture(scope="module")
def runs(train_runs: Callable, span_data: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("processes")
    data = {key: span_data[key] for key in ("input_tokenizer_file", "output_prefix")}
    alone, together = (
        {
            name: settings | (data if SENTINEL in settings.get("sample_prompts", "") else {})
            for name, settings in table.items()
        }
        for table in (ALONE, TOGETHER)
    )
    resumed = {f"{name}_resumed": alone[name] for name in OTHERS}
    found = train_runs(alone | {name: {**each, "stop_at": 7} for name, each in resumed.items()}, folder=folder)
    found |= train_runs(resumed, folder=folder)
    together["from_two_again"]["output_model_dir"] = str(folder / "from_two")
    template = folder / "hierarchical.json"
    pairs = {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 2000}
    template.write_text(json.dumps({"zero_optimization": pairs}), encoding="utf-8")
    hierarchical = {"zero_stage": 3, "micro_batch_size": 1, "deepspeed_template": str(template)}
    together["spoilt_stage3"] |= hierarchical
    fours = {"four": hierarchical, "four_resumed": {**hierarchical, "stop_at": 7}}
    found |= train_runs(together, processes=2, folder=folder) | train_runs(fours, processes=4, folder=folder)
    return found | train_runs({"four_resumed": hierarchical}, processes=4, folder=folder)


@pytest.mark.parametrize("name", EQUAL)
def test_it_equals_one_process(runs: dict, name: str) -> None:
    one, found = runs[EQUAL[name]], runs[name]
    is_short = "train_tokens" in ALONE[EQUAL[name]]
    # With span corruption a sample takes more raw tokens than the encoder input has.
    assert len(one.losses) in ((11, 12) if is_short else (20,))
    learned = one.losses[0] - one.losses[-1]
    least = 0.1 if EQUAL[name] == "t5tied" else 0.3 if is_short else 0.5  # a tied T5 begins slowly
    assert learned > least, "nothing was learned: equality would mean nothing"
    rounding.assert_same_curve(found.losses, one.losses)
    rounding.assert_same_weights(found.weights, one.weights, at_step=len(one.losses))
    if is_short or "_tensors" in name:  # replicated parameters count once in the gradient norm
        rounding.assert_same_curve(found.grad_norms, one.grad_norms, quantity="grad_norm")
    if "eval_interval" in (ALONE | TOGETHER).get(name, {}):
        assert len(one.valid_losses) == 3
        rounding.assert_same_curve(found.valid_losses, one.valid_losses, at_step=len(one.losses))


def test_recomputation_changes_no_bit(runs: dict) -> None:
    """Under the hooks of ZeRO 3, and with tensor parallelism and intra-document masking."""
    for prefix, mode in (("recomputed", "full"), ("recomputed_tensors", "selective")):
        off = runs[f"{prefix}_off"].losses
        assert len(off) == 6 and off[-1] < off[0] and runs[f"{prefix}_{mode}"].losses == off


@pytest.mark.parametrize("name", ["four", *OTHERS])
def test_it_resumes_bit_for_bit(runs: dict, name: str) -> None:
    """With hierarchical partitioning, copies of the weights before the checkpoint's would show in the first step."""
    assert runs[name].losses[-1] < runs[name].losses[0] - 0.3
    assert_same_bits(runs[f"{name}_resumed"], runs[name])


def test_samples_are_those_of_one_process(runs: dict) -> None:
    samples = [(runs[each].folder / "samples.md").read_text(encoding="utf-8") for each in ("llama", "llama_tensors")]
    assert samples[0].count("sampled:") == 2 * 3 and samples[1] == samples[0]


def test_a_rank_holds_half_of_the_optimizer_state(runs: dict) -> None:
    numbers = sum(weight.numel() for weight in runs["one"].weights.values())
    whole = 2 * 4 * numbers  # first and second moments, fp32
    for stage in (1, 2, 3):
        sizes = [seen["optimizer_bytes"] for seen in runs[f"two_stage{stage}"].seen]
        # Partitions are padded to equal size, and each tensor has a step count.
        assert sizes == pytest.approx([whole / 2] * 2, rel=0.01), f"stage {stage}"


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
        for seen in runs[name].seen:
            assert set(seen["listening"]) == {"127.0.0.1"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_process_group_waits_as_long(runs: dict, stage: int) -> None:
    """Those that torch, megatron-core and DeepSpeed make; run_sessions.py gives them another time-out by default."""
    assert len(runs[f"two_stage{stage}"].seen) == 2
    for seen in runs[f"two_stage{stage}"].seen:
        assert len(seen["timeouts"]) > 1 and set(seen["timeouts"]) == {joining.TIMEOUT.total_seconds()}


def test_prompts_with_sentinels_are_filled_during_training(runs: dict) -> None:
    samples = (runs["t5"].folder / "samples.md").read_text(encoding="utf-8")
    assert SENTINEL in samples and samples.count("sampled:") == 2 * 3


@pytest.mark.parametrize("name", ["switch_two", "mixtral_two"])
def test_router_statistics_are_those_of_both_processes(runs: dict, name: str) -> None:
    one = next(line for line in step_metrics.read(runs[name.split("_")[0]].folder) if "expert_load" in line)
    two = next(line for line in step_metrics.read(runs[name].folder) if "expert_load" in line)
    rounding.assert_same_curve(two["expert_load"], one["expert_load"], at_step=1)
    rounding.assert_same_curve(two["router_entropy"], one["router_entropy"], at_step=1)
    assert len(two["expert_dropped"]) == len(two["expert_load"]) == 2, "layers with experts"
    assert not any("expert_load" in line for line in step_metrics.read(runs["t5"].folder))
