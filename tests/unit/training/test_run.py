"""What a run starts from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configs import config_of

from zerokara.model.shapes import ModelShape
from zerokara.training import run


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_process_reads_a_model_to_start_from(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan: Any = SimpleNamespace(shape=ModelShape.from_config(config_of(num_layers=2), 500))
    shapes = plan.shape.parameter_shapes()
    order, read = run.from_hf.names(plan.shape), []

    def open_weights(folder: Path, shape: ModelShape) -> Any:
        read.append(folder)
        return ((name, torch.ones(shapes[name])) for name in order)

    def from_one(work: Any) -> str:
        return work() if rank == 0 else ""

    monkeypatch.setattr(run.from_hf, "open_weights", open_weights)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, src: tensor.fill_(1))
    processes: Any = SimpleNamespace(rank=rank, device=torch.device("cpu"), from_one=from_one)
    found = dict(run._weights_of(Path("hf"), plan.shape, processes))
    assert read == ([Path("hf")] if rank == 0 else [])
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == shapes
