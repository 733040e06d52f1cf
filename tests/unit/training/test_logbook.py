"""The records of a run in progress: what is logged, written to ``metrics.jsonl`` and kept for the checkpoint.

Trackers beside them see each step once, and no failure there stops a training.
"""

import errno
import json
import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configs import config_of

from zerokara.checkpoint import TrainingState
from zerokara.config.data import causal
from zerokara.samples.order import MixedStage
from zerokara.samples.packed_tokens import DataPlan, TokenSource
from zerokara.training.guards import StepRecord
from zerokara.training.logbook import Logbook, peak_flops
from zerokara.training.monitoring import step_metrics
from zerokara.training.monitoring.step_metrics import Recorder, TensorBoard
from zerokara.training.planning.schedule import Schedule
from zerokara.training.processes.joining import Processes
from zerokara.training.sample_texts import Sample
from zerokara.training.validation import ValidationResult

START = TrainingState(0, 0, 0, 0.0, {}, "t", "d", "fp32", {})
SOURCES = (TokenSource("a.jsonl", 0, 33 * 40), TokenSource("b.jsonl", 33 * 40, 33 * 120))


def logbook(
    run_dir: Path, state: TrainingState = START, rank: int = 0, max_steps: int = 10, stages: Any = (), **more: Any
) -> Logbook:
    """A run of 10 steps of 8 sequences of 32 tokens, an epoch being 160 sequences."""
    config = config_of(output_model_dir=run_dir, max_steps=max_steps, **more)
    reading = DataPlan(run_dir / "train", SOURCES, causal(32), 1, "shuffle", stages, ())
    schedule = Schedule.from_config(config, config.lengths.raw, samples_per_epoch=160)
    data, processes = SimpleNamespace(training=reading), Processes(torch.device("cpu"), rank)
    plan: Any = SimpleNamespace(resolved=config, run_dir=run_dir, data=data, schedule=schedule)
    return Logbook(plan, lambda step: state.samples + (step - state.step) * 8, state, processes)


def record(step: int, loss: float, **more: Any) -> StepRecord:
    return StepRecord(step, loss, learning_rate=0.1, grad_norm=0.5, seconds=2.0, **more)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_time_left_counts_pauses_and_leaves_the_first_step_out(tmp_path: Path, clock: list[float]) -> None:
    book = logbook(tmp_path, max_steps=100, epochs=5)
    for step, seconds in ((1, 30), (2, 3), (3, 3), (4, 3)):
        clock[0] += seconds
        book.add(record(step, 5.0))
        if step != 2:
            book.log_step()
        with book.pause():
            clock[0] += 9 if step == 3 else 0
    book.close()
    assert [line["seconds_left"] for line in step_metrics.read(tmp_path)] == [99 * 30, 97 * 3, 96 * 6]


def test_a_new_run_has_no_samples_of_a_start_that_died_before_its_first_checkpoint(tmp_path: Path) -> None:
    samples = tmp_path / "samples.md"
    samples.write_text("## step 20", encoding="utf-8")
    logbook(tmp_path, replace(START, step=40)).close()
    assert samples.exists()
    logbook(tmp_path).close()
    assert not samples.exists()


def test_a_logged_step_is_a_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    book = logbook(tmp_path)
    for step, loss in enumerate((5.0, 3.0), 1):
        clock[0] += 2
        book.add(record(step, loss))
    book.add(record(3, math.nan, skip_reason="the loss is nan"))
    book.log_step({"expert_load": [1.5, 2.0]})
    book.log_step()
    book.close()
    (line,) = step_metrics.read(tmp_path)
    expected = {
        "step": 2, "tokens": 512, "epoch": 16 / 160, "loss": 4.0, "learning_rate": 0.1, "grad_norm": 0.5,
        "tokens_per_second": 128.0, "mfu_causal": None, "mfu_palm": None, "seconds_left": 16.0,
        "expert_load": [1.5, 2.0],
    }  # fmt: skip
    assert {key: line[key] for key in expected} == expected
    assert line.keys() - expected.keys() == {"memory_bytes", "seconds"}
    shown = capsys.readouterr().out
    assert "step 2/10" in shown and "loss 4.0000" in shown and "grad_norm 0.500" in shown and "mfu n/a" in shown


def test_the_share_of_the_peak_is_that_of_all_gpus(
    tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of what 2 GPUs of 1,280 FLOPs a second can, at 128 tokens a second of 10 FLOPs."""
    book: Any = logbook(tmp_path)
    book._peak_flops, book._plan.num_processes = 1280.0, 2
    book._plan.shape = SimpleNamespace(flops_per_token=lambda pairs: 8 if pairs is not None else 10)
    clock[0] += 2
    book.add(record(1, 5.0, num_pairs=8))
    book.log_step()
    book.close()
    (line,) = step_metrics.read(tmp_path)
    assert (line["mfu_causal"], line["mfu_palm"]) == (0.4, 0.5)
    assert "40.0% causal, 50.0% palm" in capsys.readouterr().out


def test_a_stage_is_announced_where_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = logbook(tmp_path, stages=(MixedStage((1, 3), 12, "shuffle"), MixedStage((1, 0), None, "shuffle")))
    for step in range(3):  # of 8 sequences
        book.log_stages(step)
    first, second = capsys.readouterr().out.splitlines()
    assert "step 1  stage 1 of 2 begins" in first and "sources 0.25 : 0.75" in first
    assert "step 2  stage 2 of 2 begins" in second


def test_a_resumed_run_logs_the_mean_over_the_break(tmp_path: Path) -> None:
    first = logbook(tmp_path)
    first.add(record(1, 5.0))
    state = replace(START, step=1, samples=8, tokens=256, seconds=7.0, facts=first.facts)
    first.close()
    resumed = logbook(tmp_path, state)
    resumed.add(record(2, 3.0))
    resumed.log_step()
    resumed.close()
    resumption, line = step_metrics.read(tmp_path)
    assert resumption == {"step": 1, "tokens": 256, "resumed": True, "seconds": 7.0}
    assert (line["step"], line["loss"]) == (2, 4.0) and line["seconds"] >= 7.0
    assert resumed.facts == {"loss": 4.0, "first_loss": 4.0}


def test_a_skipped_step_is_recorded_with_its_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = logbook(tmp_path)
    skipped = record(3, math.nan, skip_reason="the loss is nan")
    documents = [{"source": "a.jsonl", "first": 2, "last": 2}, {"source": "b.jsonl", "first": 0, "last": 5}]
    sample = {"position": 17, "sample": 4, "loss": "nan", "documents": documents}
    book.log_skipped(skipped, [sample])
    book.close()
    (line,) = step_metrics.read(tmp_path)
    assert line == {"step": 3, "tokens": 768, "skipped": "the loss is nan", "bad_samples": [sample]}
    shown = capsys.readouterr().out
    assert all(part in shown for part in ("the loss is nan", "2 to 2 of a.jsonl", "0 to 5 of b.jsonl"))


def validated(name: str, value: float, badness: float) -> ValidationResult:
    return ValidationResult(
        {name: value, "valid_examples": 3}, {name: value}, badness, [f"{name} {value:.4f}", "  more"]
    )


def test_the_facts_keep_the_first_last_and_best_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = logbook(tmp_path)
    for step, bits, accuracy in ((0, 3.0, 0.5), (2, 1.0, 0.7), (4, 2.0, 0.9)):
        loss = validated("valid_bits_per_byte", bits, bits)
        book.log_validations(step, [loss, validated("valid_accuracy", accuracy, -accuracy)] if step else [loss])
    book.close()
    assert book.facts == {
        "first_valid_bits_per_byte": 3.0, "valid_bits_per_byte": 2.0, "best_valid_bits_per_byte": 1.0,
        "best_valid_step": 2, "valid_accuracy": 0.9, "valid_step": 4, "selection_loss_at_start": 3.0,
        "selection_loss": -0.9, "best_selection_loss": -0.9, "best_step": 4, "worse_in_row": 0,
    }  # fmt: skip
    assert step_metrics.read(tmp_path)[1] == {
        "step": 2, "tokens": 512, "valid_bits_per_byte": 1.0, "valid_examples": 3
    }  # fmt: skip
    assert "step 4  valid_accuracy 0.9000" in capsys.readouterr().out


def test_a_validation_that_is_worse_twice_in_a_row_is_told_at_once_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Across a resume, too; a single one is noise."""
    book, warned = logbook(tmp_path), []
    for step, loss in ((0, 5.0), (2, 3.0), (4, 3.1), (6, 2.0), (8, 2.1), (10, 2.2), (12, 2.3)):
        if step == 10:
            book.close()
            book = logbook(tmp_path, replace(START, step=8, samples=64, tokens=2048, facts=book.facts))
        book.log_validations(step, [validated("valid_bits_per_byte", loss, loss)])
        warned += [step] if "warning" in capsys.readouterr().out else []
    book.close()
    assert warned == [10], "once for each time that it begins to rise"
    assert "at step 10" in book.facts["warning"] and "best at step 6" in book.facts["warning"]
    book = logbook(tmp_path)  # a model that only forgets what it began with
    for step, loss in ((0, 1.0), (2, 1.1), (4, 1.2)):
        book.log_validations(step, [validated("valid_bits_per_byte", loss, loss)])
    book.close()
    assert "best before the training" in book.facts["warning"]


def test_a_validation_that_was_not_finite_ends_no_later_one(tmp_path: Path) -> None:
    """state.json has no nan, but null."""
    book = logbook(tmp_path, replace(START, facts={"selection_loss": None, "valid_step": 2}))
    book.log_validations(4, [validated("valid_bits_per_byte", 3.0, 3.0)])
    book.close()
    assert (book.facts["worse_in_row"], book.facts["best_step"]) == (0, 4)
    book = logbook(tmp_path)
    for step, loss in ((0, math.nan), (2, 3.0), (4, 3.1), (6, 3.2)):
        book.log_validations(step, [validated("valid_bits_per_byte", loss, loss)])
    book.close()
    assert "best at step 2" in book.facts["warning"]


def test_only_the_first_process_writes_and_all_keep_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 0):
        book = logbook(tmp_path, rank=rank)
        book.add(record(1, 5.0))
        book.log_step()
        book.log_samples(0, [Sample("Once", ", , ,", " upon a time")])
        book.flush()
        book.close()
        assert book.facts["loss"] == 5.0
        shown = capsys.readouterr().out
        if rank:
            assert not list(tmp_path.iterdir()) and not shown
    assert "Once⟪upon a time⟫" in shown and ", , ," not in shown
    written = (tmp_path / "samples.md").read_text(encoding="utf-8")
    assert "upon a time" in written and ", , ," in written


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GeForce RTX 3090 Ti", 80),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA L40", None),
        ("", None),
    ],
)
def test_a_peak_is_known_by_name_or_not_at_all(name: str, teraflops: float | None) -> None:
    assert peak_flops(name) == (teraflops and teraflops * 1e12)


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


@pytest.mark.parametrize("anew", [False, True])
def test_a_step_has_one_validation(tmp_path: Path, anew: bool) -> None:
    """Also where a start has another metric or text, and so measures the step that it begins at once more."""
    lines = [{"step": 1, "valid_loss": 5.0}, step_line(2), {"step": 2, "valid_loss": 4.0}]
    first = Recorder(tmp_path, 0, {})
    for line in lines:
        first.record(line)
    first.close()
    Recorder(tmp_path, 2, {}, repeats_validation=anew).close()
    assert step_metrics.read(tmp_path) == (lines[:2] if anew else lines)


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
            recorder.record(step_line(step, learning_rate=0.5, mfu_palm=None, source_tokens=[step, 2 * step]))
            if step == 8:
                recorder.show(step, {"samples": f"text {step} of {first}"})
        recorder.close()
    shown = tensorboard_values(tmp_path)
    assert shown["train/loss"] == [(step, pytest.approx(10.0 / (step + 1))) for step in range(10)]
    assert shown["data/source_tokens/1"] == [(step, 2.0 * step) for step in range(10)]
    assert shown["samples/text_summary"][-1] == (8, "text 8 of 2")
    assert "speed/mfu_palm" not in shown


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
    tracker = FakeTracker()
    recorder = Recorder(tmp_path, 0, {"fake": lambda: tracker})
    numbers = {"epoch": 2.0, "loss": 2.0, "mfu_causal": 2.0, "mfu_palm": None, "valid_end_nats": 2.0}
    recorder.record({"step": 1, "tokens": 9, "source_tokens": [3.0, 4.0], "router_entropy": [3.0], **numbers})
    recorder.record({"step": 2, "tokens": 9, "skipped": "the loss is nan", "bad_samples": [{"position": 1}]})
    recorder.record({"step": 2, "tokens": 9, "resumed": True})
    recorder.close()
    assert tracker.shown == [
        {
            "data/tokens": 9, "data/source_tokens/0": 3, "data/source_tokens/1": 4, "router/entropy/0": 3,
            "data/epoch": 2, "train/loss": 2, "speed/mfu_causal": 2, "valid/end_nats": 2,
        },
        {"data/tokens": 9, "train/skipped": 1},
        {"data/tokens": 9},
    ]  # fmt: skip


@pytest.mark.parametrize(("fails_at_start", "num_calls"), [(True, 0), (False, 1)])
def test_a_tracker_that_fails(tmp_path: Path, fails_at_start: bool, num_calls: int, messages: list[str]) -> None:
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


def test_lines_that_a_full_disk_refuses_are_written_later(tmp_path: Path, messages: list[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    recorder = Recorder(tmp_path, 0, {})
    recorder.record(step_line(1))
    with room_for(path.stat().st_size + 9):  # half a line
        recorder.record(step_line(2))
        recorder.record(step_line(3))
        recorder.flush()
        assert recorded_steps(tmp_path) == [1]
    recorder.record(step_line(4))
    recorder.close()
    assert recorded_steps(tmp_path) == [1, 2, 3, 4]
    assert len(messages) == 1 and str(path) in messages[0]
