"""Tensor parallelism: two ranks that share the matrices of each layer train as one process, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import rounding
from tiny import nothing_small

COMMON = {"zero_stage": 0, "lr": 0.003, "micro_batch_size": 8}
FAMILIES = {
    "llama_tied": {**COMMON},
    "llama_untied": {**COMMON, "tie_word_embeddings": "false"},
    "qwen3": {**COMMON, "architecture": "qwen3"},
    "gpt2_tied": {**COMMON, "architecture": "gpt2", "num_kv_heads": "auto"},
    "gpt2_untied": {**COMMON, "architecture": "gpt2", "num_kv_heads": "auto", "tie_word_embeddings": "false"},
}
CASES = [("llama_tied", 0), ("llama_tied", 3), ("llama_untied", 2), ("qwen3", 1), ("gpt2_tied", 1), ("gpt2_untied", 3)]
"""And Llama at stage 1 below, where it resumes from one process."""
WATCHED = {"sample_prompts": "[ab, cde]", "sample_tokens": 5, "eval_interval": 10}
SHARED = {**COMMON, "tensor_parallel_size": 2, "zero_stage": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor_parallel")


@pytest.fixture(scope="module")
def runs(train_runs: Callable, folder: Path) -> dict:
    alone = {**{name: dict(settings) for name, settings in FAMILIES.items()}, "from_one": {**COMMON, "stop_at": 10}}
    shared = {f"{family}_{stage}": {**FAMILIES[family], **SHARED, "zero_stage": stage} for family, stage in CASES}
    for run in (alone["llama_tied"], shared["llama_tied_0"], shared["llama_tied_3"]):
        run.update(WATCHED)
    shared["llama_tied_3"]["deepspeed_template"] = str(nothing_small(folder))
    shared["from_one"] = SHARED
    shared["from_two"] = {**SHARED, "stop_at": 10}
    shared["spoilt"] = {**SHARED, "spoil_at": ["decoder.layers.1.pre_mlp_layernorm.weight", 4]}
    # The same folder once more, the two processes now data-parallel.
    shared["from_two_again"] = {
        **COMMON,
        "zero_stage": 2,
        "micro_batch_size": 4,
        "output_model_dir": str(folder / "from_two"),
    }
    return {**train_runs(alone, folder=folder), **train_runs(shared, processes=2, folder=folder)}


@pytest.mark.parametrize(("family", "stage"), CASES)
def test_two_tensor_parallel_ranks_equal_one_process(runs: dict, family: str, stage: int) -> None:
    one, two = runs[family], runs[f"{family}_{stage}"]
    assert len(one.losses) == 20
    assert one.losses[-1] < one.losses[0] - 0.5, "nothing was learned: equality would mean nothing"
    rounding.assert_same_curve(two.losses, one.losses)
    # Replicated parameters count once in the gradient norm.
    rounding.assert_same_curve(two.grad_norms, one.grad_norms, quantity="grad_norm")
    rounding.assert_same_weights(two.weights, one.weights, at_step=20)


@pytest.mark.parametrize("stage", [0, 3])
def test_validation_and_samples_are_those_of_one_process(runs: dict, stage: int) -> None:
    one, two = runs["llama_tied"], runs[f"llama_tied_{stage}"]
    assert len(one.valid_losses) == 3
    rounding.assert_same_curve(two.valid_losses, one.valid_losses, at_step=20)
    samples = [(run.folder / "samples.md").read_text(encoding="utf-8") for run in (one, two)]
    assert samples[0].count("sampled:") == 2 * 3 and samples[1] == samples[0]


@pytest.mark.parametrize("name", ["from_one", "from_two"])
def test_a_run_resumes_with_another_tensor_parallel_size(runs: dict, name: str) -> None:
    rounding.assert_same_curve(runs[name].losses, runs["llama_tied"].losses)
    rounding.assert_same_weights(runs[name].weights, runs["llama_tied"].weights, at_step=20)


def test_a_replicated_weight_that_diverged_stops_the_run(runs: dict) -> None:
    message = (runs["spoilt"].folder / "spoilt.txt").read_text(encoding="utf-8")
    for part in ("steps 4 to 4", "process 0", "process 1", "decoder.layers.1.pre_mlp_layernorm.weight"):
        assert part in message
    assert not (runs["spoilt"].folder / "latest").exists()
