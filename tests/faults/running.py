"""Training processes that faults befall, what they must end as, and the count of faults tried and survived."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tiny import Trained

from zerokara import checkpoint
from zerokara.training import metrics

STEPS = 44
"""Of 8 sequences over a corpus of some 300: the run crosses the edge of an epoch."""
_survived: dict[str, list[int]] = defaultdict(lambda: [0, 0])
"""Kind of fault → how many were tried, and how many survived."""


@dataclass
class Forge:
    """Training processes, one at a time."""

    settings: dict[str, str]
    folder: Path
    process: subprocess.Popen[str]
    root: str = ""
    """Where the forge's own file systems are seen from here."""
    pid: int = field(default=0)
    """Of the process that was started and not waited for; 0 where there is none."""

    def start(self, run_dir: Path, fault: dict[str, Any] | None = None, **settings: object) -> None:
        """Start training in `run_dir`; `settings` are those of config.yaml."""
        if self.pid:  # of a test that failed
            self.kill()
        arguments = ["--config", self.settings["config"]]
        for key, value in {**settings, "output_model_dir": run_dir}.items():
            arguments += ["--set", f"{key}={value}"]
        self.log.write_bytes(b"")
        self._send({"arguments": arguments, "log": str(self.log), "fault": fault or {}})
        self.pid = self._receive()["pid"]

    def wait(self) -> int:
        """The exit code; minus the number of the signal that ended it."""
        self._receive()
        self._send({})
        self.pid = 0
        return int(self._receive()["code"])

    def kill(self) -> int:
        """kill -9 now, and wait."""
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def run(self, run_dir: Path, fault: dict[str, Any] | None = None, **settings: object) -> int:
        """Start and wait."""
        self.start(run_dir, fault, **settings)
        return self.wait()

    @property
    def log(self) -> Path:
        """Where the last process's words are."""
        return self.folder / "log.txt"

    @property
    def words(self) -> str:
        """What the last process said."""
        return self.log.read_text(encoding="utf-8")

    def _send(self, job: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # the libraries, too, say things when they are imported
                return dict(json.loads(line))
        raise AssertionError("the forge died: " + (self.folder / "forge.txt").read_text(encoding="utf-8"))


def make_forge(settings: dict[str, str], folder: Path, prefix: tuple[str, ...] = ()) -> Iterator[Forge]:
    """Start a forge, `prefix` before its command, and end it."""
    command = [*prefix, sys.executable, str(Path(__file__).with_name("forge.py"))]
    with open(folder / "forge.txt", "wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
    forge = Forge(settings, folder, process, root=f"/proc/{process.pid}/root")
    try:
        assert forge._receive() == {"ready": True}
        yield forge
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()


COMMON: dict[str, object] = {
    "train_tokens": STEPS * 8 * 32,
    "num_layers": 1,
    "save_interval": 2,
    "keep_last": 2,
    "eval_interval": 8,
    "eval_tokens": "all",
    "log_interval": 1,
    "zero_stage": 0,
}
"""The run that all faults befall: many small steps, and a save every other one."""


def trained_unbroken(forge: Forge, run_dir: Path, fault: dict[str, Any] | None = None, **settings: object) -> Trained:
    """Train `COMMON` from one end to the other."""
    code = forge.run(run_dir, fault, **{**COMMON, **settings})
    assert code == 0, forge.words
    return Trained(run_dir)


def assert_equal(run_dir: Path, expected: Trained) -> None:
    """See that a run ended as another: each loss, each validation, each weight, bit for bit."""
    import torch

    def series(folder: Path, key: str) -> list[tuple[int, float]]:
        return [(line["step"], line[key]) for line in metrics.read(folder) if key in line]

    for key in ("loss", "valid_loss", "skipped"):
        assert series(run_dir, key) == series(expected.folder, key), key
    weights, others = Trained(run_dir).weights, expected.weights
    assert weights.keys() == others.keys()
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def whole_checkpoints(run_dir: Path) -> list[int]:
    """The steps of the checkpoints that are there, after seeing that every one of them is whole."""
    steps = checkpoint.all_steps(run_dir)
    for step in steps:
        checkpoint.check(checkpoint.folder_of(run_dir, step))
    return steps


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


class Fault:
    """Counts one fault as tried, and as survived where its block ends without an error."""

    def __init__(self, kind: str, times: int = 1):
        self._count, self._times = _survived[kind], times

    def __enter__(self) -> None:
        self._count[0] += self._times

    def __exit__(self, kind: object, *_: object) -> None:
        self._count[1] += self._times if kind is None else 0


def table() -> list[str]:
    """The faults tried so far, by kind."""
    if not _survived:
        return []
    rows = [*sorted(_survived.items()), ("in all", [sum(column) for column in zip(*_survived.values(), strict=True)])]
    return [f"{survived:>5} of {tried:<5} {kind}" for kind, (tried, survived) in rows]
