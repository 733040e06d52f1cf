"""The state of a process by arithmetic is the bytes of the tensors that real training processes hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configs import RECIPE
from programs import answers_of

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model.shapes import ModelShape
from zerokara.training.compute.updater import load_template
from zerokara.training.planning.memory import SAVE_COPY, MemoryForecast, state_bytes

VOCABULARY = 500
"""As in measure_memory.py."""
TOLERANCE = 0.02
"""Beside the state, a process holds a micro batch, rotary tables, and what DeepSpeed pads: in fp32, at stages 1 and 2,
the whole gradient of a parameter that the border between two ranks cuts. So no parameter here is large."""
MODEL = {"num_layers": 12, "hidden_size": 256, "num_attn_heads": 8, "seq_len": 64}
BATCH = {"global_batch_size": 4, "micro_batch_size": 1}
"""Gradient accumulation, with two processes too."""
OVERLAPPING = str(Path(__file__).with_name("overlapping_template.json"))
"""As on a GPU, where gradients are reduced through two buffers in turn."""
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO 0": (1, {"zero_stage": 0}),
    "ZeRO 1, one process": (1, {"zero_stage": 1}),
    "ZeRO 1": (2, {"zero_stage": 1}),
    "ZeRO 1, no accumulation": (2, {"zero_stage": 1, "micro_batch_size": 2}),
    "ZeRO 2": (2, {"zero_stage": 2}),
    "ZeRO 2, overlapping": (2, {"zero_stage": 2, "deepspeed_template": OVERLAPPING}),
    "ZeRO 3": (2, {"zero_stage": 3}),
    "bf16, ZeRO 0": (1, {"zero_stage": 0, "precision": "bf16"}),
    "bf16, ZeRO 1": (2, {"zero_stage": 1, "precision": "bf16"}),
    "bf16, ZeRO 2": (2, {"zero_stage": 2, "precision": "bf16"}),
    "bf16, ZeRO 3": (2, {"zero_stage": 3, "precision": "bf16"}),
    "tensor parallel": (2, {"tensor_parallel_size": 2}),
    "gpt2": (1, {"architecture": "gpt2", "zero_stage": 2}),
    "adafactor": (1, {"optimizer": "adafactor"}),
    "adafactor, bf16, ZeRO 1": (2, {"optimizer": "adafactor", "precision": "bf16"}),
    "muon, ZeRO 1": (2, {"optimizer": "muon"}),
    "muon, bf16, ZeRO 0": (2, {"optimizer": "muon", "precision": "bf16", "zero_stage": 0}),
}


def settings_of(name: str) -> dict[str, Any]:
    return {**RECIPE, **MODEL, **BATCH, "precision": "fp32", **RUNS[name][1]}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, python_path: None) -> dict[str, dict[str, int]]:
    jobs = {name: {"processes": processes, **settings_of(name)} for name, (processes, _) in RUNS.items()}
    return answers_of("measure_memory.py", jobs, tmp_path_factory.mktemp("memory"))


@pytest.mark.parametrize("name", RUNS)
def test_the_state_is_the_bytes_of_the_tensors(measured: dict[str, dict[str, int]], name: str) -> None:
    given = [f"{key}={value}" for key, value in settings_of(name).items()]
    loaded = load(PretrainConfig, "/dev/null", given)
    template = load_template(loaded.deepspeed_template)
    shape = ModelShape.from_config(loaded, VOCABULARY)
    # As on a GPU: on a CPU a buffer that is not written to is a tensor, and takes no memory.
    # The measured processes do not overlap by themselves: they run on a CPU.
    zero = {"overlap_comm": False, **template.get("zero_optimization", {})}
    template = {**template, "zero_optimization": zero}
    run = MemoryForecast(loaded, shape, RUNS[name][0], nodes=1, template=template, main_bytes=0, gpu_bytes=0)
    parts, found = state_bytes(run), measured[name]
    copy, bucket = parts.pop(SAVE_COPY), parts.get("reduce bucket", 0)
    held = sum(parts.values())
    if not bucket or loaded.zero_stage == 3:
        assert held == pytest.approx(found["between"], rel=TOLERANCE)
    elif loaded.micro_batch * run.data_parallel_size < loaded.global_batch:
        # Stages 1 and 2 have their buffer only within a backward pass.
        assert held == pytest.approx(found["within"], rel=TOLERANCE)
    else:  # the buffer and what it is reduced to are both there at its very end
        assert held - bucket == pytest.approx(found["between"], rel=TOLERANCE)
    assert copy == -(-found["saved"] // RUNS[name][0])
