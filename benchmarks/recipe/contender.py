"""What the systems of the contest have in common: what is equal for all, what each one is asked for, and its clock.

A contender trains on a number of tokens and tells how fast its steps were. Its data, what it imports, what it compiles
and what it saves are not counted, for nobody; neither are its first two steps, in which a compiler works.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIRST_STEPS = 2
"""Not counted: they compile, and choose kernels."""


class RunFailed(Exception):
    """A command ended with an error, or did not do what it was asked for."""


@dataclass(frozen=True)
class Corpus:
    """A corpus as `corpus.prepare` makes it: the same documents and the same token ids for everybody."""

    name: str
    config: Path
    """Names the token files and the tokenizer."""
    folder: Path
    tokenizer: Path
    vocab_size: int
    bos_id: int
    eos_id: int
    sha256: str
    """Of tokenizer, token files and context length."""

    @property
    def train_texts(self) -> Path:
        """JSON lines with `text`, the training documents."""
        return self.folder / "train.json"

    @property
    def heldout_texts(self) -> Path:
        """JSON lines with `text` alone."""
        return self.folder / "heldout_texts.json"

    @property
    def heldout(self) -> Path:
        """JSON lines with `text` and `ids`, the validation documents."""
        return self.folder / "heldout.json"

    @property
    def train_ids(self) -> Path:
        """int32[tokens]: the ids of the training documents, each with the end-of-document id behind it."""
        return self.folder / "train_ids.npy"

    @property
    def hf_tokenizer(self) -> Path:
        """The same tokenizer for `AutoTokenizer`; it puts the beginning-of-sequence token first, as Llama's does."""
        return self.folder / "hf_tokenizer"


@dataclass(frozen=True)
class Shape:
    """The size of the model, the same for all but nanochat, whose width follows from its depth."""

    layers: int
    hidden_size: int
    heads: int
    ffn_hidden_size: int
    seq_len: int


@dataclass(frozen=True)
class Contest:
    """What is equal for all."""

    corpus: Corpus
    size: str
    shape: Shape
    precision: str
    """fp32 or bf16, of this run."""
    threads: int
    peers: Path | None
    """Folder of `pip install --target`."""
    nanochat: Path | None
    """A checkout."""
    run_clm: Path | None
    """The script."""
    settings: tuple[str, ...] = ()
    """Settings of ours that are not the shipped ones."""


@dataclass(frozen=True)
class Job:
    """One training."""

    tokens: int
    """On which the learning-rate schedule and all rules go by."""
    seed: int
    folder: Path
    is_trial: bool = False
    """Whether it only measures the speed: it ends after `trial_tokens`."""
    trial_tokens: int = 0

    @property
    def log(self) -> Path:
        """All that the commands print."""
        return self.folder / "log.txt"

    def steps(self, batch_tokens: int) -> int:
        """Optimizer steps to take."""
        tokens = self.trial_tokens if self.is_trial else self.tokens
        return max(round(tokens / batch_tokens), FIRST_STEPS + 1 if self.is_trial else 1)


@dataclass(frozen=True)
class Trained:
    """What came out."""

    tokens: int
    steps: int
    tokens_per_second: float
    """Of the steps after the first ones."""
    scoring: tuple[str, str]
    """Kind of model and its place, for `score.py`."""
    begin_id: int
    """The token before a document in training."""
    facts: dict[str, Any]
    """What the system chose."""

    @property
    def seconds(self) -> float:
        """Seconds of all steps, at their speed."""
        return self.tokens / self.tokens_per_second


class Contender(ABC):
    """A system with a recipe."""

    name: str
    explanation: str

    @abstractmethod
    def batch_tokens(self, contest: Contest, tokens: int) -> int:
        """Tokens of an optimizer step in a run over `tokens`."""

    @abstractmethod
    def train(self, contest: Contest, job: Job) -> Trained:
        """Train.

        Raises:
            RunFailed: names the log.
        """


def rate(batch_tokens: int, seconds: Sequence[float]) -> float:
    """Tokens a second of single steps, without the first ones where there are others."""
    counted = seconds[FIRST_STEPS:] or seconds[-1:]
    return batch_tokens * len(counted) / sum(counted)


def run(
    contest: Contest, job: Job, command: Sequence[object], paths: Sequence[Path | None] = (), **variables: str
) -> float:
    """Run a command with the contest's threads and `paths` before all other modules; return its seconds.

    Raises:
        RunFailed: its exit code is not 0.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1"}
    if paths:  # the others; ours counts cores and sets its threads itself
        threads = str(contest.threads)
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads)
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(job.folder.parent / "compiled")
        modules = [*paths, ROOT, environment.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(str(path) for path in modules if path)
    started = time.monotonic()
    with open(job.log, "a", encoding="utf-8") as log:
        print(f"$ {' '.join(map(str, command))}", file=log, flush=True)
        done = subprocess.run(
            [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={**environment, **variables}, check=False,
        )  # fmt: skip
    if done.returncode:
        last = job.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1]
        raise RunFailed(f"exit code {done.returncode}: {last[:200]} ({job.log})")
    return time.monotonic() - started


def python(module: str) -> list[str]:
    """The command that runs a module of this folder."""
    return [sys.executable, "-m", f"benchmarks.recipe.{module}"]
