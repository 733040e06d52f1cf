"""``metrics.jsonl`` and those who watch beside it: each step once, and nothing that fails there stops a training."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.training.monitoring import metrics


def settings(*overrides: str) -> PretrainConfig:
    return load(PretrainConfig, "/dev/null", ["tensorboard=false", *overrides])


def step_line(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "tokens": 10 * step, "loss": 10.0 / (step + 1), **values}


def test_metrics_forget_what_will_be_trained_again(tmp_path: Path) -> None:
    first = metrics.Recorder(tmp_path, settings(), resumed_step=0)
    for step in (1, 2, 3):
        first.record({"step": step, "tokens": step, "loss": 3.0 - step})
    first.close()
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 4, "lo')  # a process that was killed in the middle of a line
    again = metrics.Recorder(tmp_path, settings(), resumed_step=2)
    again.record({"step": 3, "tokens": 3, "loss": 0.5})
    again.close()
    assert [(line["step"], line["loss"]) for line in metrics.read(tmp_path)] == [(1, 2.0), (2, 1.0), (3, 0.5)]
    assert all(json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines())


def test_a_run_that_begins_anew_and_one_that_resumes_twice_at_one_step_record_once(tmp_path: Path) -> None:
    lines = [{"step": 0, "valid_loss": 5.0}, step_line(1), step_line(2), {"step": 2, "tokens": 20, "resumed": True}]
    for resumed_step, kept in ((2, 3), (1, 2), (0, 0)):
        recorder = metrics.Recorder(tmp_path, settings(), resumed_step=0)
        for line in lines:
            recorder.record(line)
        recorder.close()
        metrics.Recorder(tmp_path, settings(), resumed_step).close()
        assert metrics.read(tmp_path) == lines[:kept]


def tensorboard_values(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard's own reader shows of a run: name → steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    shown = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    for name in events.Tags()["tensors"]:
        shown[name] = [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(name)]
    return shown


def test_tensorboard_shows_each_step_once_across_resumes(tmp_path: Path) -> None:
    watched = settings("tensorboard=true")
    for first, last in ((0, 12), (8, 20), (0, 3), (2, 9)):  # cut short and resumed, begun anew, cut short again
        recorder = metrics.Recorder(tmp_path, watched, resumed_step=first)
        for step in range(first + 1 if first else 0, last + 1):
            recorder.record(step_line(step, learning_rate=0.5, mfu=None, source_tokens=[step, 2 * step]))
            if step == 8:
                recorder.text(step, "samples", f"text {step} of {first}")
        recorder.close()
    shown = tensorboard_values(tmp_path)
    assert shown["loss"] == [(step, pytest.approx(10.0 / (step + 1))) for step in range(10)]
    assert shown["source_tokens/1"] == [(step, 2.0 * step) for step in range(10)]
    assert shown["samples/text_summary"][-1] == (8, "text 8 of 2")
    assert "mfu" not in shown


class Refusing:
    """A watcher on a full disk."""

    def __init__(self) -> None:
        self.asked = 0

    def numbers(self, step: int, values: dict[str, float]) -> None:
        self.asked += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    text = flush = close = numbers


@pytest.mark.parametrize("fails_at", ["the start", "the first step"])
def test_a_watcher_that_fails_is_left_out_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    refusing, said = Refusing(), list[str]()

    def start(run_dir: Path, first_step: int) -> Refusing:
        if fails_at == "the start":
            raise OSError(errno.ENOSPC, "No space left on device")
        return refusing

    monkeypatch.setattr(metrics, "_tensorboard", start)
    recorder = metrics.Recorder(tmp_path, settings("tensorboard=true"), 0, said.append)
    for step in (1, 2):
        recorder.record(step_line(step))
    recorder.flush()
    recorder.close()
    assert said == ["tensorboard: [Errno 28] No space left on device; going on without it"]
    assert refusing.asked == (0 if fails_at == "the start" else 1)
    assert [line["step"] for line in metrics.read(tmp_path)] == [1, 2]


def test_what_a_full_disk_refuses_is_written_when_there_is_room_again(tmp_path: Path) -> None:
    said: list[str] = []
    recorder = metrics.Recorder(tmp_path, settings(), 0, said.append)
    recorder.record(step_line(1))
    whole, lines = recorder._lines._file, recorder._lines
    full: Any = open("/dev/full", "ab", buffering=0)  # noqa: SIM115  # every write to it finds no space
    lines._file = full
    recorder.record(step_line(2))
    recorder.record(step_line(3))
    assert [line["step"] for line in metrics.read(tmp_path)] == [1]
    lines._file = whole
    recorder.record(step_line(4))
    recorder.close()
    full.close()
    assert [line["step"] for line in metrics.read(tmp_path)] == [1, 2, 3, 4]
    assert len(said) == 1 and "No space left on device; its lines are kept until they can be written" in said[0]


def test_a_line_that_is_taken_in_part_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = metrics.Recorder(tmp_path, settings(), 0, lambda _: None)
    recorder.record(step_line(1))

    class Narrow:
        """A file on a disk with room for nine bytes."""

        def __init__(self, file: Any):
            self.file = file

        def write(self, content: bytes) -> int:
            return self.file.write(content[:9])

        def fileno(self) -> int:
            return self.file.fileno()

    whole = recorder._lines._file
    monkeypatch.setattr(recorder._lines, "_file", Narrow(whole))
    recorder.record(step_line(2))
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 1
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")
    monkeypatch.setattr(recorder._lines, "_file", whole)
    recorder.close()
    assert [line["step"] for line in metrics.read(tmp_path)] == [1, 2]
