"""``metrics.jsonl`` and the trackers beside it: each step once, and no failure there stops a training."""

from __future__ import annotations

import errno
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from zerokara.training.monitoring import step_metrics
from zerokara.training.monitoring.step_metrics import Recorder, TensorBoard


def step_line(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "tokens": 10 * step, "loss": 10.0 / (step + 1), **values}


def recorded_steps(run_dir: Path) -> list[int]:
    return [line["step"] for line in step_metrics.read(run_dir)]


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """Let no file grow beyond `num_bytes`: the write that crosses it is cut short, and the next one fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(("resumed_step", "kept"), [(2, 3), (1, 2), (0, 0)])
def test_steps_that_will_be_trained_again_are_forgotten(tmp_path: Path, resumed_step: int, kept: int) -> None:
    lines = [{"step": 0, "valid_loss": 5.0}, step_line(1), step_line(2), {"step": 2, "tokens": 20, "resumed": True}]
    first = Recorder(tmp_path, 0, {})
    for line in lines:
        first.record(line)
    first.close()
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 3, "lo')  # a process that was killed in the middle of a line
    resumed = Recorder(tmp_path, resumed_step, {})
    resumed.record(step_line(resumed_step + 1))
    resumed.close()
    assert step_metrics.read(tmp_path) == [*lines[:kept], step_line(resumed_step + 1)]
    assert all(json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines())


def tensorboard_values(run_dir: Path) -> dict[str, list[tuple[int, Any]]]:
    """What TensorBoard's own reader shows of a run: tag → steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    shown: dict[str, list[tuple[int, Any]]] = {
        name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]
    }
    for name in events.Tags()["tensors"]:
        shown[name] = [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(name)]
    return shown


def test_tensorboard_shows_each_step_once_across_resumes(tmp_path: Path) -> None:
    for first, last in ((0, 12), (8, 20), (0, 3), (2, 9)):  # killed and resumed, restarted, killed and resumed
        recorder = Recorder(tmp_path, first, {"tensorboard": lambda: TensorBoard(tmp_path, first)})  # noqa: B023
        for step in range(first + 1 if first else 0, last + 1):
            recorder.record(step_line(step, learning_rate=0.5, mfu=None, source_tokens=[step, 2 * step]))
            if step == 8:
                recorder.show(step, {"samples": f"text {step} of {first}"})
        recorder.close()
    shown = tensorboard_values(tmp_path)
    assert shown["train/loss"] == [(step, pytest.approx(10.0 / (step + 1))) for step in range(10)]
    assert shown["data/source_tokens/1"] == [(step, 2.0 * step) for step in range(10)]
    assert shown["samples/text_summary"][-1] == (8, "text 8 of 2")
    assert "speed/mfu" not in shown


class FakeTracker:
    """A tracker that keeps what it is shown, and fails with `error` if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.shown: list[dict[str, float]] = []
        self.num_calls, self._error = 0, error

    def show(self, step: int, values: dict[str, float]) -> None:
        self.shown.append(values)
        self.close()

    def close(self) -> None:
        self.num_calls += 1
        if self._error:
            raise self._error


def test_every_number_of_every_kind_of_line_is_a_curve_in_a_group(tmp_path: Path) -> None:
    numbers = (
        "epoch", "loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "memory_bytes", "seconds_left",
        "valid_loss", "valid_end_nats",
    )  # fmt: skip
    lists = ("source_tokens", "expert_load", "expert_dropped", "router_entropy", "valid_loss_by_source")
    tracker = FakeTracker()
    recorder = Recorder(tmp_path, 0, {"fake": lambda: tracker})
    recorder.record({"step": 1, "tokens": 9} | dict.fromkeys(numbers, 2.0) | {name: [3.0, 4.0] for name in lists})
    recorder.record({"step": 2, "tokens": 9, "skipped": "the loss is nan", "bad_samples": [{"position": 1}]})
    recorder.record({"step": 2, "tokens": 9, "resumed": True, "mfu": None})
    recorder.close()
    assert tracker.shown[0] == {
        "data/tokens": 9, "data/epoch": 2, "train/loss": 2, "train/learning_rate": 2, "train/grad_norm": 2,
        "speed/tokens_per_second": 2, "speed/mfu": 2, "speed/memory_bytes": 2, "speed/seconds_left": 2,
        "valid/loss": 2, "valid/end_nats": 2,
        "data/source_tokens/0": 3, "data/source_tokens/1": 4, "router/expert_load/0": 3, "router/expert_load/1": 4,
        "router/expert_dropped/0": 3, "router/expert_dropped/1": 4, "router/entropy/0": 3, "router/entropy/1": 4,
        "valid/loss_by_source/0": 3, "valid/loss_by_source/1": 4,
    }  # fmt: skip
    assert tracker.shown[1:] == [{"data/tokens": 9, "train/skipped": 1}, {"data/tokens": 9}]


@pytest.mark.parametrize(("fails_at_start", "num_calls"), [(True, 0), (False, 1)])
def test_a_tracker_that_fails_is_dropped_and_logged_once(
    tmp_path: Path, fails_at_start: bool, num_calls: int, messages: list[str]
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    failing, good = FakeTracker(full), FakeTracker()

    def start() -> FakeTracker:
        if fails_at_start:
            raise full
        return failing

    recorder = Recorder(tmp_path, 0, {"failing": start, "good": lambda: good})
    for step in (1, 2):
        recorder.record(step_line(step))
    recorder.flush()
    recorder.close()
    (message,) = messages
    assert message.startswith("failing: ") and "No space left on device" in message
    assert (failing.num_calls, good.num_calls) == (num_calls, 3)
    assert recorded_steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("room", [0, 9], ids=["no room", "room for half a line"])
def test_lines_that_a_full_disk_refuses_are_written_when_there_is_room_again(
    tmp_path: Path, messages: list[str], room: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    recorder = Recorder(tmp_path, 0, {})
    recorder.record(step_line(1))
    before = path.read_bytes()
    with room_for(len(before) + room):
        recorder.record(step_line(2))
        recorder.record(step_line(3))
        assert path.read_bytes() == before, "half a line is left"
    recorder.record(step_line(4))
    recorder.close()
    assert recorded_steps(tmp_path) == [1, 2, 3, 4]
    assert len(messages) == 1 and str(path) in messages[0]
