"""The small runs that a scaling law is fitted on: step 3 itself, several at a time, in a folder of the plan's.

In: the configuration and the rungs of `ladder`. Out: the bits per byte of each. A run that is finished is a line of
``runs.jsonl`` and is not trained again; one that was interrupted goes on where it was. What step 3 says goes into a log
beside it; its checkpoints are deleted once its result is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from zerokara.durable import make_folders
from zerokara.errors import RunError
from zerokara.forecast.ladder import Rung
from zerokara.forecast.law import MeasuredRun
from zerokara.forecast.machine import Planner, overrides
from zerokara.forecast.seats import Seat
from zerokara.forecast.sizes import Speed, effective_parameters
from zerokara.progress import Progress, count_text
from zerokara.training.monitoring import metrics

RESULTS_NAME = "runs.jsonl"
_QUIET: dict[str, Any] = {
    "max_steps": "auto",
    "max_hours": "auto",
    "max_hours_per_start": "auto",
    "stages": "[]",
    "init_from": "",
    "eval_interval": 10**9,
    "save_interval": 10**9,
    "keep_every": 0,
    "keep_last": 1,
    "keep_best": "false",
    "sample_prompts": "[]",
    "plots": "false",
    "tensorboard": "false",
    "wandb": "off",
}
"""A run is validated and saved at its end only, and nobody watches it."""


@dataclass(frozen=True)
class SmallRuns:
    """Where the runs are trained, and from what."""

    planner: Planner
    folder: Path

    def measure(self, rungs: Sequence[Rung], speed: Speed, seats: Sequence[Seat]) -> list[MeasuredRun]:
        """Train what is not trained yet, on each seat one run at a time; return all, in the order of `rungs`.

        Raises:
            RunError: step 3 failed; names its log.
            KeyboardInterrupt: it was stopped; the same call goes on.
        """
        make_folders(self.folder)
        finished = self._finished()
        waiting = [rung for rung in rungs if self._key(rung) not in finished]
        seconds = {self._key(rung): rung.seconds(speed) / len(seats) for rung in rungs}
        total, done = sum(seconds.values()), sum(seconds[key] for key in seconds if key in finished)
        free: queue.SimpleQueue[Seat] = queue.SimpleQueue()
        for seat in seats:
            free.put(seat)
        running = Running()

        def train(rung: Rung) -> Rung:
            seat = free.get()
            try:
                with seat.taken():
                    self._train(rung, seat, running)
            finally:  # where it failed too: its thread may take the next run before all is called off
                free.put(seat)
            return rung

        with (
            Progress("training small models", total, unit="s", done=done) as progress,
            ThreadPoolExecutor(len(seats)) as pool,
        ):
            try:
                for future in as_completed([pool.submit(train, rung) for rung in waiting]):
                    rung = future.result()
                    parameters, tokens = count_text(rung.shape.num_parameters()), count_text(rung.tokens)
                    progress.note(trained=f"{parameters} parameters on {tokens} tokens")
                    progress.advance(seconds[self._key(rung)])
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                running.stop()
                raise
        finished = self._finished()
        return [finished[self._key(rung)] for rung in rungs]

    def forget(self) -> None:
        """Leave nothing of earlier runs, so that all are trained again."""
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def _train(self, rung: Rung, seat: Seat, running: Running) -> None:
        folder, log = self.folder / self._key(rung), self.folder / f"{self._key(rung)}.log"
        settings = {**_QUIET, **self.planner.alone, **rung.settings, "output_model_dir": folder}
        settings |= {"train_tokens": rung.tokens, "eval_tokens": rung.eval_tokens, "global_batch_size": rung.batch}
        command = [sys.executable, "-P", "-m", "zerokara.steps", "train", "--config", str(self.planner.config_path)]
        command += [part for each in (*self.planner.overrides, *overrides(settings)) for part in ("--set", each)]
        environment = {**os.environ, **seat.environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with open(log, "ab") as file:
            code = running.run(command, file, environment)
        if code:
            raise RunError(f"a small run ended with exit code {code}; {log} says why")
        validated = [line for line in metrics.read(folder) if "valid_bits_per_byte" in line]
        if not validated:
            raise RunError(f"a small run was not validated; {log} says what it did")
        tokens = [line["tokens"] for line in metrics.read(folder) if "tokens" in line][-1]
        run = MeasuredRun(effective_parameters(rung.shape), tokens, validated[-1]["valid_bits_per_byte"])
        self.record(rung, run)
        shutil.rmtree(folder)

    def record(self, rung: Rung, run: MeasuredRun) -> None:
        """Write down a result, so that the rung is not trained again."""
        make_folders(self.folder)
        line = json.dumps({"key": self._key(rung), **asdict(run)}) + "\n"
        with open(self.folder / RESULTS_NAME, "ab", buffering=0) as file:  # one write: several runs may end at a time
            file.write(line.encode())

    def _finished(self) -> dict[str, MeasuredRun]:
        return {line.pop("key"): MeasuredRun(**line) for line in _lines(self.folder / RESULTS_NAME)}

    def _key(self, rung: Rung) -> str:
        """A name for the run, by all that it is made of."""
        settings = sorted(self.planner.overrides)
        made_of = [self.planner.identity, settings, rung.shape.as_json(), rung.tokens, rung.eval_tokens]
        return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]


class Running:
    """The programs that run now, to end them all."""

    def __init__(self) -> None:
        self._programs: set[subprocess.Popen[bytes]] = set()
        self._lock, self._stopped = threading.Lock(), False

    def __len__(self) -> int:
        return len(self._programs)

    def run(self, command: Sequence[str], output: IO[bytes] | int | None, environment: Mapping[str, str]) -> int:
        """Run a program to its end; give its exit code."""
        with self._lock:
            if self._stopped:
                raise KeyboardInterrupt
            program = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
            self._programs.add(program)
        try:
            return program.wait()
        finally:
            with self._lock:
                self._programs.discard(program)

    def stop(self) -> None:
        """Ask all to save and to end; no further one begins."""
        with self._lock:
            self._stopped = True
            for program in self._programs:
                program.terminate()


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file; a crash may have cut the last one short."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
