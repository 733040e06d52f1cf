"""What a run records: ``metrics.jsonl``, each step once, also after a resume; and the same for those who watch.

Lines of ``metrics.jsonl``, each with ``step`` and ``tokens`` (read so far):

* a logged step: ``epoch``, ``loss`` (nats a token, mean over the steps since the line before), ``learning_rate``,
  ``grad_norm``, ``tokens_per_second`` (of the steps alone, without validations and saves), ``mfu`` (or null),
  ``memory_bytes``, ``seconds`` (trained so far, over all starts, all included), ``seconds_left``, and where sources are
  mixed ``source_tokens`` (a list: read so far of each source); where layers hold experts, a list of each sparse layer:
  ``expert_load`` (the busiest expert's over the mean), ``expert_dropped`` (share of choices that found no room) and
  ``router_entropy`` (nats), since the line before;
* a validation: ``valid_loss``, ``valid_bits_per_byte``, ``valid_tokens``, and where there are several sources
  ``valid_loss_by_source``, ``valid_bits_per_byte_by_source``;
* a step that was skipped: ``skipped`` (why), ``bad_samples``;
* the step after which a start went on: ``resumed`` (true), ``seconds``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from zerokara.durable import write_bytes
from zerokara.progress import log

if TYPE_CHECKING:  # whoever only reads (the plots, in a process of their own) does not wait for it
    from zerokara.config.pretrain_config import PretrainConfig

FILE_NAME = "metrics.jsonl"


def read(run_dir: Path) -> list[dict[str, Any]]:
    """All lines; one cut short by a crash is left out."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return []
    lines = []
    for line in path.read_bytes().splitlines():
        try:
            lines.append(orjson.loads(line))
        except orjson.JSONDecodeError:
            continue
    return lines


def forget_after(run_dir: Path, step: int) -> None:
    """Drop what was recorded behind `step`: those steps will be trained again and recorded again.

    At step 0 the run begins anew, with its first validation.
    """
    kept = [
        line for line in read(run_dir) if 0 < step >= line["step"] and not (line["step"] == step and _resumed(line))
    ]
    content = b"".join(orjson.dumps(line) + b"\n" for line in kept)
    path = run_dir / FILE_NAME
    if not path.exists() or path.read_bytes() != content:
        write_bytes(path, content)


def _resumed(line: dict[str, Any]) -> bool:
    return "resumed" in line


class Watcher(Protocol):
    """Somebody who is shown a run's numbers beside ``metrics.jsonl``."""

    def numbers(self, step: int, values: dict[str, float]) -> None:
        """Take in numbers of a step."""

    def text(self, step: int, name: str, markdown: str) -> None:
        """Take in a text of a step."""

    def flush(self) -> None:
        """Bring what was taken in to disk."""

    def close(self) -> None:
        """Flush and end."""


class Recorder:
    """Writes lines to every place where they are watched. Only the first process has one.

    Nothing that fails in here ends the training: what ``metrics.jsonl`` cannot take is kept until it can, and a watcher
    that fails is left out from then on; either is told once.
    """

    def __init__(self, run_dir: Path, config: PretrainConfig, resumed_step: int, log: Callable[[str], None] = log):
        self._log = log
        forget_after(run_dir, resumed_step)
        self._lines = _LineFile(run_dir / FILE_NAME, log)
        self._watchers: dict[str, Watcher] = {}
        first_step = resumed_step + 1 if resumed_step else 0
        if config.tensorboard:
            self._start("tensorboard", lambda: _tensorboard(run_dir, first_step))
        if config.wandb != "off":
            self._start("wandb", lambda: _wandb(run_dir, config, log))

    def record(self, line: dict[str, Any]) -> None:
        """Write one line."""
        self._lines.write(orjson.dumps(line) + b"\n")
        numbers = dict(_numbers(line))
        self._tell(lambda watcher: watcher.numbers(line["step"], numbers))

    def text(self, step: int, name: str, markdown: str) -> None:
        """Show a text to those who show texts."""
        self._tell(lambda watcher: watcher.text(step, name, markdown))

    def flush(self) -> None:
        """Bring everything to disk: a checkpoint is about to say that it happened."""
        self._lines.sync()
        self._tell(lambda watcher: watcher.flush())

    def close(self) -> None:
        """Flush and end."""
        self._lines.close()
        self._tell(lambda watcher: watcher.close())

    def _start(self, name: str, make: Callable[[], Watcher]) -> None:
        try:
            self._watchers[name] = make()
        except Exception as error:  # whatever fails over there, the training goes on
            self._leave_out(name, error)

    def _tell(self, tell: Callable[[Watcher], None]) -> None:
        for name, watcher in list(self._watchers.items()):
            try:
                tell(watcher)
            except Exception as error:  # as above
                del self._watchers[name]
                self._leave_out(name, error)

    def _leave_out(self, name: str, error: Exception) -> None:
        self._log(f"{name}: {error or type(error).__name__}; going on without it")


class _LineFile:
    """A file that whole lines are added to; what the disk does not take waits for the next time."""

    def __init__(self, path: Path, log: Callable[[str], None]):
        self._path, self._log = path, log
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  # closed in `close`
        self._size = self._file.tell()
        self._waiting, self._told = b"", False

    def write(self, line: bytes) -> None:
        self._waiting += line
        try:
            written = self._file.write(self._waiting) or 0
            if written < len(self._waiting):
                os.truncate(self._file.fileno(), self._size)  # no half line is left
                raise OSError(f"only {written} of {len(self._waiting)} bytes were taken")
        except OSError as error:
            if not self._told:
                self._log(f"{self._path}: {error.strerror or error}; its lines are kept until they can be written")
            self._told = True
        else:
            self._size += len(self._waiting)
            self._waiting, self._told = b"", False

    def sync(self) -> None:
        if self._waiting:
            self.write(b"")
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._log(f"{self._path}: {error.strerror or error}")

    def close(self) -> None:
        self.sync()
        self._file.close()


def _tensorboard(run_dir: Path, first_step: int) -> Watcher:
    from zerokara.training.monitoring.tensorboard import TensorBoard

    return TensorBoard(run_dir, first_step)


def _wandb(run_dir: Path, config: PretrainConfig, log: Callable[[str], None]) -> Watcher:
    from zerokara.training.monitoring.weights_and_biases import WeightsAndBiases

    return WeightsAndBiases(run_dir, config, log)


def _numbers(line: dict[str, Any]) -> list[tuple[str, float]]:
    """What of a line is a curve: its numbers, those of a list each by itself, and a 1 where a step was skipped."""
    found: list[tuple[str, float]] = []
    for name, value in line.items():
        if name in ("step", "resumed", "bad_samples"):
            continue
        if name == "skipped":
            found.append((name, 1))
        elif isinstance(value, int | float):
            found.append((name, value))
        elif isinstance(value, list):
            found += [(f"{name}/{number}", one) for number, one in enumerate(value)]
    return found
