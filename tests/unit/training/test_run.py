"""The weights that a run starts from, and batches that are prepared while the device works on those before."""

import contextlib
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from configs import config_of

from zerokara.model.shapes import ModelShape
from zerokara.samples.objective import Batch
from zerokara.training import run
from zerokara.training.run import StepBatches, load_batches

NUM_STEPS, MICRO_BATCHES = 4, 2


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_process_reads_a_model_to_start_from(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(num_layers=2, init_from="hf", lr=0.1)
    plan: Any = SimpleNamespace(shape=ModelShape.from_config(config, 500), resolved=config, encoder=None)
    shapes = plan.shape.parameter_shapes()
    order, read = run.from_hf.names(plan.shape), []

    def open_weights(folder: Path, *_: Any) -> Any:
        read.append(folder)
        return ((name, torch.ones(shapes[name])) for name in order)

    def from_one(work: Any) -> str:
        return work() if rank == 0 else ""

    monkeypatch.setattr(run.from_hf, "open_weights", open_weights)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, src: tensor.fill_(1))
    processes: Any = SimpleNamespace(rank=rank, device=torch.device("cpu"), from_one=from_one)
    found = dict(run._weights_of(plan, processes))
    assert read == ([Path("hf")] if rank == 0 else [])
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == shapes


class CountedBatches:
    """Batches of known content that record the steps, and the thread that made them."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.threads: set[str] = set()
        self.is_made = {step: threading.Event() for step in range(1, NUM_STEPS + 2)}

    def at(self, consumed: int) -> Iterator[Batch]:
        step = consumed // MICRO_BATCHES + 1
        self.steps.append(step)
        self.threads.add(threading.current_thread().name)
        for index in range(MICRO_BATCHES):
            ids = np.full((1, 3), consumed + index)
            yield Batch(ids, ids + 1, np.ones((1, 3), dtype=np.float32) * (index == 0))
        self.is_made[step].set()


def loader_of(batches: Any, first_step: int = 1) -> Generator[StepBatches]:
    steps = range(first_step, NUM_STEPS + 1)
    return load_batches(batches, lambda step: (step - 1) * MICRO_BATCHES, steps, torch.device("cpu"))


def test_each_step_gets_its_own_batches() -> None:
    for step, taken in enumerate(loader_of(CountedBatches(), first_step=3), 3):  # a resumed run begins anywhere
        inputs = [micro_batch[0] for micro_batch in taken.micro_batches]
        expected = [torch.full((1, 3), (step - 1) * MICRO_BATCHES + index) for index in range(MICRO_BATCHES)]
        assert all(torch.equal(one, other) for one, other in zip(inputs, expected, strict=True))
        assert taken.num_tokens == 3  # the second micro batch predicts nothing
    assert step == NUM_STEPS


def test_the_next_step_is_prepared_before_it_is_asked_for_and_none_beyond_the_last() -> None:
    batches = CountedBatches()
    loader = loader_of(batches)
    for step in range(1, NUM_STEPS + 1):
        next(loader)
        if step < NUM_STEPS:
            assert batches.is_made[step + 1].wait(timeout=10)
    loader.close()
    assert batches.steps == [1, 2, 3, 4] and threading.current_thread().name not in batches.threads


def test_a_failure_reaches_the_step_that_needs_the_batch() -> None:
    class Failing(CountedBatches):
        def at(self, consumed: int) -> Iterator[Batch]:
            if consumed == 2 * MICRO_BATCHES:
                raise OSError("the disk is gone")
            return super().at(consumed)

    with contextlib.closing(loader_of(Failing())) as loader:
        next(loader)
        next(loader)  # the third fails in the background meanwhile
        with pytest.raises(OSError, match="the disk is gone"):
            next(loader)
