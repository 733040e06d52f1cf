"""The small runs that a scaling law is fitted on: step 3 itself, one after another, in a folder of the plan's.

In: the configuration and the rungs of `ladder`. Out: the bits per byte of each. A run that is finished is a line of
``runs.jsonl`` and is not trained again; one that was interrupted goes on where it was. What step 3 says goes into a log
beside it; its checkpoints are deleted once its result is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zerokara.durable import make_folders
from zerokara.errors import RunError
from zerokara.forecast.ladder import MAX_EVAL_TOKENS, Rung
from zerokara.forecast.law import MeasuredRun
from zerokara.forecast.machine import Planner, overrides
from zerokara.forecast.sizes import Speed, effective_parameters
from zerokara.progress import Progress, count_text
from zerokara.training.monitoring import metrics
from zerokara.training.planning import recipe

RESULTS_NAME = "runs.jsonl"
_QUIET: dict[str, Any] = {
    "max_steps": "auto",
    "max_hours": "auto",
    "max_hours_per_start": "auto",
    "stages": "[]",
    "init_from": "",
    "eval_interval": 10**9,
    "eval_tokens": MAX_EVAL_TOKENS,
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
_STEP_3 = "zerokara.steps.train"


@dataclass(frozen=True)
class SmallRuns:
    """Where the runs are trained, and from what."""

    planner: Planner
    folder: Path

    def measure(self, rungs: Sequence[Rung], speed: Speed) -> list[MeasuredRun]:
        """Train what is not trained yet; return all, in the order of `rungs`.

        Raises:
            RunError: step 3 failed; names its log.
            KeyboardInterrupt: it was stopped; the same call goes on.
        """
        make_folders(self.folder)
        seconds = [rung.seconds(speed) for rung in rungs]
        with Progress("training small models", sum(seconds), unit="s") as progress:
            for rung, cost in zip(rungs, seconds, strict=True):
                progress.phase(
                    f"{count_text(rung.shape.num_parameters())} parameters, {count_text(rung.tokens)} tokens"
                )
                if self._key(rung) not in self._finished():
                    self._train(rung)
                progress.advance(cost)
        finished = self._finished()
        return [finished[self._key(rung)] for rung in rungs]

    def forget(self) -> None:
        """Leave nothing of earlier runs, so that all are trained again."""
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def _train(self, rung: Rung) -> None:
        folder, log = self.folder / self._key(rung), self.folder / f"{self._key(rung)}.log"
        settings = {**_settings(rung), **self.planner.small_runs, "output_model_dir": folder}
        command = [sys.executable, "-P", "-m", _STEP_3, "--config", str(self.planner.config_path)]
        command += [part for each in (*self.planner.overrides, *overrides(settings)) for part in ("--set", each)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with open(log, "ab") as file:
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment
            ).returncode
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
        with open(self.folder / RESULTS_NAME, "a", encoding="utf-8") as file:
            file.write(json.dumps({"key": self._key(rung), **asdict(run)}) + "\n")

    def _finished(self) -> dict[str, MeasuredRun]:
        return {line.pop("key"): MeasuredRun(**line) for line in _lines(self.folder / RESULTS_NAME)}

    def _key(self, rung: Rung) -> str:
        """A name for the run, by all that it is made of."""
        settings = sorted(self.planner.overrides)
        made_of = [self.planner.identity, settings, rung.shape.as_json(), rung.tokens, recipe.VERSION]
        return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]


def _settings(rung: Rung) -> dict[str, Any]:
    """Those of a small run: its size, its length, and the recipe for both."""
    autos = dict.fromkeys([*recipe.RULES, "warmup_fraction"], "auto")
    return {**_QUIET, **autos, **rung.settings, "train_tokens": rung.tokens}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file; a crash may have cut the last one short."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
