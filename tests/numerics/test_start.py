"""A start costs no process more than training does, draws each number once, and gives the weights of seed and name."""

from __future__ import annotations

import hashlib
import math
from operator import itemgetter
from typing import Any

import pytest
import torch
from configs import RECIPE
from programs import answers_of

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import initial_weights, parallel
from zerokara.model.builder import build
from zerokara.model.shapes import ModelShape

VOCABULARY, SEED = 500, 1
"""As in measure_start.py."""
PROCESSES = 4
"""Where memory is measured; two elsewhere."""
SMALL = {"num_layers": 2, "hidden_size": 64, "num_attn_heads": 4, "seq_len": 32}
LARGE = {"num_layers": 6, "hidden_size": 512, "num_attn_heads": 8, "seq_len": 32}
"""20M parameters."""
SLACK = 12e6
"""Bytes of what a first start loads: code, communication buffers."""
RUNS: dict[str, dict[str, Any]] = {
    **{f"ZeRO {stage}, {to}": {"zero_stage": stage, "precision": to} for stage in range(4) for to in ("fp32", "bf16")},
    "adafactor, bf16": {"optimizer": "adafactor", "precision": "bf16"},
    "gpt2, tensor parallel": {"architecture": "gpt2", "tensor_parallel_size": 2},
}  # fmt: skip
OF_MEMORY = {f"ZeRO {stage}, {to}, 20M": LARGE | {"zero_stage": stage, "precision": to}
             for stage, to in ((1, "bf16"), (3, "bf16"))}  # fmt: skip


def settings_of(name: str) -> dict[str, Any]:
    given = {**RUNS, **OF_MEMORY}[name]
    return {**RECIPE, **SMALL, "micro_batch_size": 1, "global_batch_size": PROCESSES, "precision": "fp32", **given}


def shape_of(name: str) -> ModelShape:
    config = load(PretrainConfig, "/dev/null", [f"{key}={value}" for key, value in settings_of(name).items()])
    return ModelShape.from_config(config, VOCABULARY)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, python_path: None) -> dict[str, list[dict[str, Any]]]:
    names = [*RUNS, *OF_MEMORY]
    jobs = {name: {"processes": PROCESSES if name in OF_MEMORY else 2, **settings_of(name)} for name in names}
    return answers_of("measure_start.py", jobs, tmp_path_factory.mktemp("start"))


@pytest.mark.parametrize("name", RUNS)
def test_the_weights_are_those_that_a_lone_process_draws(measured: dict[str, Any], name: str) -> None:
    parallel.start_alone()
    model, settings = build(shape_of(name), seed=SEED), settings_of(name)
    expected, weights = hashlib.sha256(), [weight for _, weight in sorted(model.named_parameters(), key=itemgetter(0))]
    for weight in weights:
        expected.update(weight.detach().numpy().tobytes())
    if settings.get("zero_stage", 1) < 3 and "tensor_parallel_size" not in settings:
        in_bf16 = settings["precision"] == "bf16"
        for weight in weights:
            computing = weight.detach().bfloat16().float() if in_bf16 else weight.detach()
            expected.update(computing.numpy().tobytes())
    assert {each["digest"] for each in measured[name]} == {expected.hexdigest()}


@pytest.mark.parametrize("name", OF_MEMORY)
def test_each_number_is_drawn_once_over_all_processes(measured: dict[str, Any], name: str) -> None:
    shapes = shape_of(name).parameter_shapes()
    random = sum(math.prod(shape) for shape in shapes.values() if len(shape) > 1)
    counts = [each["drawn"] for each in measured[name]]
    assert sum(counts) == random
    assert max(counts) < 1.2 * random / PROCESSES


@pytest.mark.parametrize("name", OF_MEMORY)
def test_no_process_holds_more_than_it_trains_with_and_two_tensors(measured: dict[str, Any], name: str) -> None:
    sizes, settings = [math.prod(shape) for shape in shape_of(name).parameter_shapes().values()], settings_of(name)
    beside = 2 * 4 * max(sizes)
    if settings["zero_stage"] < 3:  # gloo's all-gather of the computing weights, as in every update
        beside += (2 if settings["precision"] == "bf16" else 4) * sum(sizes)
    for each in measured[name]:
        assert each["peak"] < each["held"] + beside + SLACK


def test_deepspeed_probes_no_operators(measured: dict[str, Any]) -> None:
    assert {each["probes"] for processes in measured.values() for each in processes} == {0}


def test_what_is_drawn_at_the_same_time_is_alike_in_size() -> None:
    parallel.start_alone()
    shape = shape_of("adafactor, bf16")
    drawn = initial_weights.drawn_by_all(shape, SEED, torch.device("cpu"))
    sizes = [tensor.numel() for _, tensor in drawn]
    assert sizes == sorted(sizes, reverse=True)
