"""The numbers of a run: ``metrics.jsonl``, which has each step once, also after a resume, and the trackers beside it.

Lines of ``metrics.jsonl``, each with ``step`` and ``tokens`` (trained on so far):

* a logged step: ``epoch``, ``loss`` (nats per token, mean over the steps since the line before), ``learning_rate``,
  ``grad_norm``, ``tokens_per_second`` (of the steps alone, without validations and saves), ``mfu`` (or null),
  ``memory_bytes``, ``seconds`` (of the run so far, over all starts), ``seconds_left``, and where sources are mixed
  ``source_tokens`` (a list: trained on so far, by source). Where layers have experts, over the steps since the line
  before, lists by MoE layer: ``expert_load`` (the busiest expert's over the mean), ``expert_dropped`` (share of choices
  dropped for lack of capacity), ``router_entropy`` (nats);
* a validation: ``valid_loss`` (nats per predicted token), ``valid_bits_per_byte`` (of the text alone),
  ``valid_end_nats`` (per end-of-document token, or null; in span corruption the end of a target is one too, and there
  is ``valid_sentinel_nats``), ``valid_tokens`` (all predicted), and where there are several sources
  ``valid_loss_by_source``, ``valid_bits_per_byte_by_source``, and in ``valid_source_positions`` the place of each of
  them in ``input_jsonl``. (A line without ``valid_end_nats`` is older: its bits per byte count control tokens in.)
* a skipped step: ``skipped`` (the reason), ``bad_samples``;
* the step that a start resumed from: ``resumed`` (true), ``seconds``.

Trackers (TensorBoard, Weights & Biases) are shown the same numbers as curves in groups: ``train/loss``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from zerokara.durable import write_bytes
from zerokara.progress import log
from zerokara.training.monitoring.trackers import Plots, TensorBoard, WeightsAndBiases

FILE_NAME = "metrics.jsonl"
Tracker = Plots | TensorBoard | WeightsAndBiases
_GROUPS = {
    "speed": ("tokens_per_second", "mfu", "memory_bytes", "seconds", "seconds_left"),
    "data": ("tokens", "epoch", "source_tokens"),
    "router": ("expert_load", "expert_dropped", "router_entropy"),
}
"""By which trackers arrange curves; all other numbers are in ``valid/`` and ``train/``."""
_NO_CURVES = ("step", "resumed", "bad_samples", "valid_source_positions")


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Return all lines but those that a crash cut short."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return []
    lines = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(orjson.JSONDecodeError):
            lines.append(orjson.loads(line))
    return lines


def forget_after(run_dir: Path, step: int) -> None:
    """Drop the lines of the steps after `step`, which will be trained and recorded again; step 0 drops all lines."""
    kept = [
        line for line in read(run_dir) if 0 < step >= line["step"] and not (line["step"] == step and "resumed" in line)
    ]
    content = b"".join(orjson.dumps(line) + b"\n" for line in kept)
    path = run_dir / FILE_NAME
    if not path.exists() or path.read_bytes() != content:
        write_bytes(path, content)


class Recorder:
    """Writes lines to ``metrics.jsonl`` and shows them to the trackers; only the first process has one.

    No failure in here ends the training: lines that the disk refuses are kept until it takes them, and a tracker that
    fails is dropped. Both are logged once.
    """

    def __init__(
        self,
        run_dir: Path,
        resumed_step: int,
        trackers: Mapping[str, Callable[[], Tracker]],
        log: Callable[[str], None] = log,
    ):
        """Record a start that resumes from `resumed_step` (0: a new run); `trackers` opens each tracker by name."""
        self._path, self._log = run_dir / FILE_NAME, log
        forget_after(run_dir, resumed_step)
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  # closed in `close`
        self._size = self._file.tell()
        self._waiting, self._is_refused = b"", False
        self._trackers: dict[str, Tracker] = {}
        for name, start in trackers.items():
            try:
                self._trackers[name] = start()
            except Exception as error:  # whatever fails in a tracker, the training continues
                self._log_dropped(name, error)

    def record(self, line: dict[str, Any]) -> None:
        """Write one line."""
        self._waiting += orjson.dumps(line) + b"\n"
        self._write()
        curves = _curves(line)
        self._for_each_tracker(lambda tracker: tracker.show(line["step"], curves))

    def text(self, step: int, name: str, markdown: str) -> None:
        """Show a text to the trackers."""
        self._for_each_tracker(lambda tracker: tracker.show(step, {name: markdown}))

    def flush(self) -> None:
        """Bring everything to disk: a checkpoint that refers to it is about to be written."""
        self._write()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._log(f"{self._path}: {error.strerror or error}")
        self._for_each_tracker(lambda tracker: tracker.flush())

    def close(self) -> None:
        """Bring everything to disk, and end."""
        self.flush()
        self._file.close()
        self._for_each_tracker(lambda tracker: tracker.close())

    def _write(self) -> None:
        """Append the lines that wait, whole; those that the disk refuses go on waiting."""
        try:
            written = self._file.write(self._waiting) or 0
            if written < len(self._waiting):
                os.truncate(self._file.fileno(), self._size)  # no half line is left
                raise OSError(f"only {written} of {len(self._waiting)} bytes were written")
        except OSError as error:
            if not self._is_refused:
                reason = error.strerror or error
                self._log(f"{self._path}: {reason}; new lines are kept in memory until they can be written")
            self._is_refused = True
        else:
            self._size += written
            self._waiting, self._is_refused = b"", False

    def _for_each_tracker(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # as above
                del self._trackers[name]
                self._log_dropped(name, error)

    def _log_dropped(self, name: str, error: Exception) -> None:
        self._log(f"{name}: {error or type(error).__name__}; training continues without it")


def _curves(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line by curve: each number of a list by itself, and 1 where a step was skipped."""
    curves: dict[str, float] = {}
    for name, value in line.items():
        if name in _NO_CURVES:
            continue
        others = "valid" if name.startswith("valid_") else "train"
        group = next((group for group, names in _GROUPS.items() if name in names), others)
        tag = f"{group}/{name.removeprefix(f'{group}_')}"
        if name == "skipped":
            curves[tag] = 1
        elif isinstance(value, list):
            curves.update({f"{tag}/{number}": each for number, each in enumerate(value)})
        elif isinstance(value, int | float):
            curves[tag] = value
    return curves
