"""What does a training process do besides the model's own work, and how long does a save keep it from training?

    python -m benchmarks.training.loop [--steps 24] [--set key=value …]

Trains a model of about 40M parameters as step 3 does, with all that stands between the steps: reading the token files,
comparing the processes, the log, metrics, TensorBoard, checkpoints. Prints

* the share of a step that is spent outside of the model's forward and backward pass and its update;
* how long training waited at a save, beside what copying the state takes and what a save takes that training waits
  for; and how much slower the steps were while a checkpoint was being written.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerokara.base.progress import bytes_text, count_text
from zerokara.checkpoint import store
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.corpus import embedded
from zerokara.training.compute.engine import master_weights, optimizer_state
from zerokara.training.guards import StepRecord
from zerokara.training.loop import Trainer
from zerokara.training.planning import run_folder
from zerokara.training.planning.run_plan import RunPlan, make_plan
from zerokara.training.saving import HostCopy

ROOT = Path(__file__).resolve().parents[2]

SHAPE = [
    "num_layers=12", "hidden_size=512", "num_attn_heads=8", "num_kv_heads=4", "ffn_hidden_size=1408", "seq_len=512",
    "micro_batch_size=4", "global_batch_size=4", "precision=fp32", "num_processes=1", "optimizer=adamw",
    "lr=0.001", "min_lr=0.0001", "lr_schedule=cosine", "warmup_fraction=0.02", "weight_decay=0.1",
    "muon_momentum=0.95",
]  # fmt: skip
"""With a vocabulary of 8,000 about 40 million parameters."""
SAVE_INTERVAL = 6
WARM_UP_STEPS = 2


class Watched(Trainer):
    """A trainer whose times are taken."""

    def __init__(self, plan: RunPlan):
        super().__init__(plan, validations=lambda *_: [])
        self.timed = Timed(self.run.engine)
        self.run = replace(self.run, engine=self.timed)  # type: ignore[arg-type]
        self.sampler = None  # it is no part of a step, nor is the validation
        self.whole: dict[int, float] = {}
        """Step → seconds from the end of the one before to its own end, saving left out."""
        self.outside: dict[int, float] = {}
        """Of these, those that went neither into the model nor into its update."""
        self.stalls: list[float] = []
        self.disturbed: set[int] = set()
        """Steps that began while a checkpoint was being written."""
        self._since = time.perf_counter()

    def after_step(self, record: StepRecord) -> bool:
        before = sum(self.stalls)
        leaving = super().after_step(record)
        now = time.perf_counter()
        whole = now - self._since - (sum(self.stalls) - before)
        self.whole[record.step], self.outside[record.step] = whole, whole - self.timed.take_seconds()
        self._since = time.perf_counter()
        return leaving

    def save(self, step: int) -> None:
        started = time.perf_counter()
        super().save(step)
        self.stalls.append(time.perf_counter() - started)
        self.disturbed.add(step + 1)


class Timed:
    """An engine that knows how long its work took."""

    def __init__(self, engine: Any):
        self._engine, self._seconds = engine, 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._engine, name)
        if name not in ("accumulate", "update"):
            return value

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = value(*arguments)
            self._seconds += time.perf_counter() - started
            return result

        return timed

    def take_seconds(self) -> float:
        """Seconds since the last call."""
        taken, self._seconds = self._seconds, 0.0
        return taken


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of config.yaml")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        report(train(make_data(Path(name)), given, Path(name)))


def make_data(folder: Path) -> list[str]:
    """Steps 1 and 2 on the embedded corpus; gives the settings of step 3."""
    corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer"
    embedded.main(corpus)
    corpora = [f"input_jsonl=[{corpus}]", f"input_tokenizer_file={tokenizer}/tokenizer.model"]
    placed = {
        "train_tokenizer": [f"input=[{corpus}]", f"output_dir={tokenizer}", "vocab_size=8000"],
        "tokenize": [*corpora, f"output_prefix={folder}/tokens"],
    }
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "original_codes")}
    for step, settings in placed.items():
        arguments = [part for setting in settings for part in ("--set", setting)]
        command = [sys.executable, "-m", "zerokara.steps", step, *arguments]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    return placed["tokenize"]


def train(data: list[str], given: argparse.Namespace, folder: Path) -> Watched:
    """Train as a process that the launcher started does."""
    settings = load(
        PretrainConfig,
        "/dev/null",
        [*SHAPE, *data, f"output_model_dir={folder}/run", f"save_interval={SAVE_INTERVAL}", *given.set],
    )
    tokens = given.steps * settings.global_batch_size * settings.seq_len
    plan = make_plan(settings.model_copy(update={"train_tokens": tokens})).on_processes(1)
    plan = plan.with_settings(precision="fp32")
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    run_folder.claim(plan)
    watched = Watched(plan)
    watched.train()
    return watched


def report(watched: Watched) -> None:
    """The numbers, last."""
    measured = [step for step in watched.whole if step > WARM_UP_STEPS]
    quiet = [step for step in measured if step not in watched.disturbed]
    share = sum(watched.outside[step] for step in quiet) / sum(watched.whole[step] for step in quiet)
    most = max(watched.outside[step] / watched.whole[step] for step in quiet)
    plan = watched.run.plan
    print(
        f"\n{count_text(plan.shape.num_parameters())} parameters, a checkpoint of {bytes_text(plan.checkpoint_bytes)}"
    )
    print(f"outside of the model and its update: {share:.2%} of {len(quiet)} steps, at most {most:.2%} of one")
    copied = [copy_seconds(watched) for _ in range(3)]
    written = [synchronous_seconds(watched, number) for number in range(3)]
    first, *later = watched.stalls
    print(f"training waited at a save: {statistics.median(later):.2f} s (the first, in fresh memory: {first:.2f} s)")
    print(f"copying the state alone: {statistics.median(copied):.2f} s")
    print(f"a save that training waits for: {statistics.median(written):.2f} s")
    usual = statistics.median(watched.whole[step] for step in quiet)
    after = statistics.median(watched.whole[step] for step in measured if step in watched.disturbed)
    print(f"the step after a save, while it is written: {after:.2f} s, other steps {usual:.2f} s")


def copy_seconds(watched: Watched) -> float:
    """Time for copying the state into memory that is there already."""
    started = time.perf_counter()
    _copy(watched, watched.saver._copy)
    return time.perf_counter() - started


def synchronous_seconds(watched: Watched, number: int) -> float:
    """Time for a save as it would be without a thread: gathered, hashed, written, synced, renamed."""
    started = time.perf_counter()
    state = _copy(watched, HostCopy(watched.run.processes.device, watched.run.plan.checkpoint_bytes // 4))
    store.save(
        watched.run.plan.run_dir,
        replace(watched.state, step=watched.state.step + 1 + number),
        state["weights"],
        state["moments"],
    )
    return time.perf_counter() - started


def _copy(watched: Watched, copy: HostCopy) -> dict[str, dict[str, Any]]:
    engine = watched.run.engine
    return copy.fill({"weights": master_weights(engine), "moments": optimizer_state(engine)})


if __name__ == "__main__":
    main()
