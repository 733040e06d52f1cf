"""Training processes that faults befall, what they must end as"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from configs import typed
from tiny import Trained, assert_same_bits

from zerokara import checkpoint
from zerokara.training.monitoring import step_metrics

STEPS = 44
"""Steps of 8 sequences over the corpus of `DATA`: a test checks that the run crosses the edge of an epoch."""
DATA: dict[str, Any] = {"num_documents": 46, "valid_min_documents": "4"}
"""For `tiny.make_data`: some 290 sequences to train on, and 7 micro batches to validate."""


DISK_BYTES = 12 * 2**20


def with_small_disk(folder: Path, num_bytes: int) -> list[str]:
    """What a command must begin with to see a small disk (a tmpfs) there; empty where users may mount none."""
    mount = f'mount -t tmpfs -o size={num_bytes} none {folder} && exec "$@"'
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    try:
        subprocess.run([*prefix, "true"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return prefix


class Forge:
    """Training processes, one at a time, each forked from a process that has everything imported (`forge.py`)."""

    def __init__(self, settings: dict[str, str], folder: Path):
        self.settings = settings
        self.step = "train"
        """Whose training processes these are: of ``train`` or ``finetune``."""
        self.pid = 0
        """Process that was started and not waited for; 0 where there is none."""
        self._log_path, self._events_path = folder / "log.txt", folder / "events.jsonl"
        self._errors_path, disk = folder / "forge.txt", folder / "disk"
        disk.mkdir()
        prefix = with_small_disk(disk, DISK_BYTES)
        self.disk = disk if prefix else None
        """A small disk of its own, as the training sees it; None where this machine lets its users mount none."""
        command = [*prefix, sys.executable, str(Path(__file__).with_name("forge.py"))]
        with open(self._errors_path, "wb") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
        assert self._receive() == {"ready": True}

    def close(self) -> None:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            child.kill()
        self.process.kill()
        self.process.wait()

    def start(
        self, run_dir: Path, fault: dict[str, Any] | None = None, work: tuple[str, ...] = ("train",), **settings: Any
    ) -> None:
        """Start training in `run_dir`; `settings` are those of config.yaml."""
        if self.pid:  # of a test that failed
            self.kill()
        given = {**settings, "output_model_dir": run_dir}
        arguments = ["--config", self.settings["config"], *typed(**given)]
        for path in (self._log_path, self._events_path):
            path.write_bytes(b"")
        job = {"step": self.step, "arguments": arguments, "work": work, "fault": fault or {}}
        self._send({**job, "log": str(self._log_path), "events": str(self._events_path)})
        self.pid = self._receive()["pid"]

    def wait(self) -> int:
        """The exit code; minus the number of the signal that ended it."""
        self._receive()
        self._send({})
        self.pid = 0
        return int(self._receive()["code"])

    def kill(self) -> int:
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def run(self, *arguments: Any, **named: Any) -> int:
        """Start as `start` does, and wait; the exit code."""
        self.start(*arguments, **named)
        return self.wait()

    @property
    def log(self) -> str:
        return self._log_path.read_text(encoding="utf-8")

    @property
    def events(self) -> list[dict[str, Any]]:
        """Events of the last process, in order (`forge._record_events`)."""
        lines = self._events_path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def values(self, name: str) -> list[Any]:
        """The values of all events with this name: ``values("saved") == [2, 4]``."""
        return [event[name] for event in self.events if name in event]

    def _send(self, job: dict[str, Any]) -> None:
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        for line in self.process.stdout:
            if line.startswith("{"):  # the libraries, too, say things when they are imported
                return dict(json.loads(line))
        raise AssertionError("the forge died: " + self._errors_path.read_text(encoding="utf-8"))


COMMON: dict[str, Any] = {
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
SHORT: dict[str, Any] = {**COMMON, "train_tokens": 6 * 8 * 32, "save_interval": 1, "keep_last": 6}
"""A run whose every step is kept."""
LEFT_OUT = {"nan_at": [8 * 2 + 1], "wild_at": [5]}
"""Its faults: step 3 is skipped for its loss, step 5 for its gradient."""
BY_COMMAND: dict[str, Any] = {
    **COMMON,
    "train_tokens": 120 * 8 * 32,
    "eval_interval": 20,
    "micro_batch_size": 2,
    "zero_stage": 2,
}
"""The run in two processes."""


def trained_unbroken(
    forge: Forge, run_dir: Path, fault: dict[str, Any] | None = None, settings: dict[str, Any] = COMMON
) -> Trained:
    code = forge.run(run_dir, fault, **settings)
    assert code == 0, forge.log
    return Trained(run_dir)


def assert_equal(run_dir: Path, expected: Trained) -> None:
    """See that a run ended as another: each loss, each validation, each weight and moment, bit for bit."""
    got = Trained(run_dir)

    def series(trained: Trained, key: str) -> list[tuple[int, float]]:
        return [(line["step"], line[key]) for line in step_metrics.read(trained.folder) if key in line]

    for key in ("loss", "grad_norm", "learning_rate", "epoch", "valid_loss", "valid_accuracy", "skipped"):
        assert series(got, key) == series(expected, key), key
    assert_same_bits(got, expected)
    assert replace(got.state, seconds=0.0) == replace(expected.state, seconds=0.0)


def whole_checkpoints(run_dir: Path) -> list[int]:
    """The steps of the checkpoints that are there, after seeing that every one of them is whole."""
    steps = checkpoint.all_steps(run_dir)
    for step in steps:
        checkpoint.check(checkpoint.folder_of(run_dir, step))
    return steps


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


class Kills:
    """Runs that are killed again and again until they end, and then must equal the unbroken one."""

    def __init__(self, forge: Forge, unbroken: Trained, folder: Path, settings: dict[str, Any] = COMMON):
        self._forge, self._unbroken, self._folder, self._settings = forge, unbroken, folder, settings

    def survive(self, number: int, kill: Callable[[Path], int]) -> None:
        """Go on until `number` kills have come; `kill` starts a run and gives its exit code, 0 where it escaped."""
        while number:
            run_dir = self._folder / f"run{len(os.listdir(self._folder))}"
            stood, code = [0], -signal.SIGKILL
            while number and code:
                code = kill(run_dir)
                assert code in (0, -signal.SIGKILL), self._forge.log
                stand = whole_checkpoints(run_dir)
                # Not only is the newest as new as before: two are kept, and so two stand from then on.
                assert max([0, *stand]) >= stood[-1] and len(stand) >= min(2, len(stood) - 1), (stood, stand)
                stood, number = [0, *stand], number - (code != 0)
            assert self._forge.run(run_dir, **self._settings) == 0, self._forge.log
            assert_equal(run_dir, self._unbroken)
