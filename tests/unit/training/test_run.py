"""The weights that a run starts from, and batches that are prepared while the device works on those before."""

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from zerokara.samples.objective import Batch
from zerokara.training import run
from zerokara.training.compute.engine import read_once
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.run import StepBatches, load_batches

NUM_STEPS, MICRO_BATCHES = 4, 2


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


def test_numbers_of_another_loss_or_another_validation_are_not_compared(
    plan_of: Callable[..., RunPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"loss": 2.0, "selection_loss": 1.0, "best_step": 3, "valid_step": 4, "first_valid_loss": 5.0}
    begun = run.state_of(plan_of(), 64, step=4, seconds=1.0, facts=facts)
    state = run._comparable(plan_of(), replace(begun, recent_losses=(2.0, 2.5)), print)
    assert state.facts.items() >= facts.items() and state.recent_losses and not capsys.readouterr().out
    assert run._comparable(plan_of(), state, print) == state
    whole = run._comparable(plan_of("eval_tokens=all"), begun, print)
    assert run._comparable(plan_of("eval_tokens=1000000"), whole, print) == whole, "which reads all of it, too"
    taught = run._comparable(plan_of("teachers=[large]"), state, print)
    assert taught.recent_losses == () and taught.facts.items() >= facts.items()
    assert run._comparable(plan_of("teachers=[large]", "teacher_weight=0.5"), state, print).recent_losses == ()
    fewer = run._comparable(plan_of("eval_tokens=100"), state, print)
    assert "best_step" not in fewer.facts and fewer.facts["loss"] == 2.0 and fewer.recent_losses
    assert "the best checkpoint is chosen from here on" in capsys.readouterr().out
    plan = plan_of()
    other = replace(plan, data=replace(plan.data, valid_sha256="another"))
    assert "selection_loss" not in run._comparable(other, state, print).facts


def test_the_norm_and_the_numbers_of_a_step_may_be_on_two_devices() -> None:
    """DeepSpeed's norm is on the CPU where it offloads."""
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):  # it has got to the reading
        read_once(torch.ones(()), torch.ones(2, dtype=torch.float64, device="cuda"))
