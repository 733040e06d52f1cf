"""What a training step asks of its device, and what it sends; watched in steps of every kind (measure_steps.py)."""

from __future__ import annotations

from typing import Any

import pytest
from configs import RECIPE
from programs import answers_of

MODEL = {"num_layers": 2, "hidden_size": 64, "num_attn_heads": 4, "seq_len": 32}
BATCH = {"global_batch_size": 8, "micro_batch_size": 2}
"""Gradient accumulation, with two processes too."""
RUNS: dict[str, dict[str, Any]] = {
    **{f"ZeRO {stage}, {to}": {"zero_stage": stage, "precision": to} for stage in range(4) for to in ("fp32", "bf16")},
    **{f"{name}, ZeRO {stage}": {"optimizer": name, "zero_stage": stage, "precision": "bf16"}
       for name, stage in (("adafactor", 0), ("adafactor", 1), ("muon", 1))},
    **{name: {"architecture": name} for name in ("qwen3", "gpt2", "t5", "mixtral", "qwen3_moe", "switch")},
    "t5_moe": {"architecture": "t5_moe", "moe_layers": "[1]", "expert_capacity_factor": 1.0},
    "mixtral, ZeRO 2, bf16": {"architecture": "mixtral", "zero_stage": 2, "precision": "bf16"},
    "mixtral, packed examples": {
        "architecture": "mixtral", "expert_capacity_factor": 1.0, "intra_document_masking": "true"},
    "masking": {"intra_document_masking": "true"},
    "masking, bf16": {"intra_document_masking": "true", "precision": "bf16"},
    "masking, bf16, checkpointing": {
        "intra_document_masking": "true", "precision": "bf16", "zero_stage": 3, "activation_checkpointing": "full"},
    "checkpointing": {"activation_checkpointing": "full"},
    "tensor parallel": {"tensor_parallel_size": 2},
    "tensor parallel, ZeRO 1": {"tensor_parallel_size": 2, "zero_stage": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, python_path: None) -> dict[str, dict[str, Any]]:
    common = {"processes": 2, **RECIPE, **MODEL, **BATCH, "precision": "fp32"}
    jobs = {name: {**common, **settings} for name, settings in RUNS.items()}
    return answers_of("measure_steps.py", jobs, tmp_path_factory.mktemp("steps"))


@pytest.mark.parametrize("name", RUNS)
def test_the_host_waits_for_the_device_once_a_step(seen: dict[str, Any], name: str) -> None:
    assert sum(seen[name]["waits"].values()) == 1, seen[name]["waits"]


@pytest.mark.parametrize("name", RUNS)
def test_gradients_are_summed_in_fp32_and_weights_move_as_they_compute(seen: dict[str, Any], name: str) -> None:
    settings = {"zero_stage": 1, "precision": "fp32", "tensor_parallel_size": 1, **RUNS[name]}
    moved = seen[name]["moved"]
    kinds = {(operation, dtype) for operation, dtype in (kind.split() for kind in moved)}
    sums = {"allreduce", "reduce", "reduce_scatter", "_reduce_scatter_base"}
    # Beside gradients: the numbers of a step in fp64.
    assert {dtype for operation, dtype in kinds if operation in sums} <= {"float32", "float64"}
    of_weights = {dtype for operation, dtype in kinds if operation not in sums}
    assert of_weights <= {"bfloat16" if settings["precision"] == "bf16" else "float32"}
    if settings["tensor_parallel_size"] == 1:
        gradients = max(size for kind, size in moved.items() if kind.split()[0] in sums)
        assert gradients > 4 * 100_000, "each parameter's, four bytes"
        assert bool(of_weights) is (settings["zero_stage"] > 0)
