"""The numbers of a run: ``metrics.jsonl``, which has each step once, also after a resume, and the trackers beside it.

docs/metrics.md lists the fields of its lines. Trackers are shown the same numbers as curves in groups: ``train/loss``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from zerokara.durable import write_file
from zerokara.errors import redacted
from zerokara.progress import log
from zerokara.training.monitoring.trackers import Plots, TensorBoard, Values, WeightsAndBiases

FILE_NAME = "metrics.jsonl"
Tracker = Plots | TensorBoard | WeightsAndBiases
_GROUPS = {
    **dict.fromkeys(("tokens_per_second", "mfu", "memory_bytes", "seconds", "seconds_left"), "speed"),
    **dict.fromkeys(("tokens", "epoch", "source_tokens"), "data"),
    **dict.fromkeys(("expert_load", "expert_dropped", "router_entropy"), "router"),
}
"""By which trackers arrange curves; all other numbers are in ``valid/`` and ``train/``."""
_NO_CURVES = ("step", "resumed", "bad_samples", "valid_source_positions")


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Return all lines but those that a crash cut short."""
    path = run_dir / FILE_NAME
    lines = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(orjson.JSONDecodeError):
            lines.append(orjson.loads(line))
    return lines


class Recorder:
    """Writes lines to ``metrics.jsonl`` and shows them to the trackers; only the first process has one.

    Lines that the disk refuses are kept until it takes them, and a tracker that fails is dropped. Both are logged once.
    """

    def __init__(self, run_dir: Path, resumed_step: int, trackers: Mapping[str, Callable[[], Tracker]]):
        """Record a start that resumes from `resumed_step` (0: a new run); `trackers` opens each tracker by name.

        Lines of later steps are dropped: these steps will be trained and recorded again.
        """
        self._path = run_dir / FILE_NAME
        kept = [line for line in read(run_dir) if 0 < resumed_step >= line["step"]]
        kept = [line for line in kept if line["step"] < resumed_step or "resumed" not in line]
        write_file(self._path, b"".join(orjson.dumps(line) + b"\n" for line in kept))
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  # closed in `close`
        self._size = self._file.tell()
        self._waiting, self._is_refused = b"", False
        self._trackers: dict[str, Tracker] = {}
        for name, start in trackers.items():
            with self._dropping(name):
                self._trackers[name] = start()

    def record(self, line: dict[str, Any]) -> None:
        """Write one line."""
        self._waiting += orjson.dumps(line) + b"\n"
        self._write()
        self.show(line["step"], _curves(line))

    def show(self, step: int, values: Values) -> None:
        """Show values to the trackers alone."""
        for name, tracker in list(self._trackers.items()):
            with self._dropping(name):
                tracker.show(step, values)

    def flush(self) -> None:
        """Bring the lines to disk: a checkpoint that refers to them is about to be written."""
        self._write()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            log(f"{self._path}: {error.strerror or error}")

    def close(self) -> None:
        """Bring everything to disk, and end."""
        self.flush()
        self._file.close()
        for name, tracker in list(self._trackers.items()):
            with self._dropping(name):
                tracker.close()

    @contextlib.contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """Drop a tracker that fails in the block: no key, no network, a full disk; the training continues."""
        try:
            yield
        except Exception as error:
            self._trackers.pop(name, None)
            message = redacted(" ".join(str(error).split())) or type(error).__name__
            log(f"{name}: {message}; training continues without it")

    def _write(self) -> None:
        """Append the lines that wait, whole; those that the disk refuses go on waiting."""
        written = 0
        try:
            while written < len(self._waiting):
                written += self._file.write(self._waiting[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(self._file.fileno(), self._size)  # no half line is left
            if not self._is_refused:
                reason = error.strerror or error
                log(f"{self._path}: {reason}; new lines are kept in memory until they can be written")
            self._is_refused = True
        else:
            self._size += written
            self._waiting, self._is_refused = b"", False


def _curves(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line by curve: each number of a list by itself, and 1 where a step was skipped."""
    curves: dict[str, Any] = {}
    for name, value in line.items():
        if name in _NO_CURVES:
            continue
        group = _GROUPS.get(name, "valid" if name.startswith("valid_") else "train")
        tag = f"{group}/{name.removeprefix(f'{group}_')}"
        if isinstance(value, list):
            curves.update({f"{tag}/{number}": each for number, each in enumerate(value)})
        else:
            curves[tag] = 1 if name == "skipped" else value
    return {tag: value for tag, value in curves.items() if isinstance(value, int | float)}
