"""A small corpus, its tokenizer and token files, made once, and training runs over them in real processes."""

import json
import os
import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import foreign_models
import pytest
import torch
import warm
from configs import TINY
from corpus_files import write_texts
from made_tokens import write_tokens

from zerokara.checkpoint import TrainingState, read_moments, read_state, read_weights
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.tokenizer.model_file import ModelFile
from zerokara.training.monitoring import step_metrics

ROOT = Path(__file__).resolve().parents[2]
NUM_SENTINELS = 10
T5 = {"architecture": "t5", "num_kv_heads": "auto", "head_dim": "16"}
"""Settings that make the small model an encoder and a decoder, whose heads are together wider than the model."""


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings that name a corpus of some thirty thousand tokens, and a small model."""
    return make_data(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def span_data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same with a tokenizer that has sentinel tokens."""
    return make_data(tmp_path_factory.mktemp("spans"), num_sentinels=NUM_SENTINELS)


def make_data(folder: Path, num_documents: int = 150, num_sentinels: int = 0, **further: str) -> dict[str, str]:
    """Make a corpus, its tokenizer and its token files; give the settings that name them, and a small model."""
    chance = random.Random(5)
    words = ["".join(chance.choices("abcdefghijklmnop", k=chance.randint(2, 7))) for _ in range(300)]
    texts = [
        " ".join(chance.choices(words, k=60)) + "\n" + " ".join(chance.choices(words, k=30))
        for _ in range(num_documents)
    ]
    kind = {**foreign_models.STEP_1, "model_type": "unigram"}
    tokenizer = foreign_models.train(folder / "tokenizer.model", kind, texts, vocab_size=500)
    model = ModelFile(tokenizer.read_bytes())
    model.append_sentinels(num_sentinels)
    tokenizer.write_bytes(model.to_bytes())
    settings = {
        "input_jsonl": write_texts(folder / "corpus.jsonl", texts),
        "input_tokenizer_file": str(tokenizer),
        "output_prefix": str(folder / "tokens"),
        **{key: str(value) for key, value in TINY.items()},
        "num_kv_heads": "2",
        "train_tokens": str(20 * 8 * 32),
        "eval_tokens": "500",
        **further,
    }
    config = folder / "config.yaml"
    config.write_text("".join(f"{key}: {value}\n" for key, value in settings.items()), encoding="utf-8")
    write_tokens(load(PretrainConfig, config))
    return {"config": str(config), **settings}


@dataclass(frozen=True)
class Trained:
    """What a run left behind; weights, moments (the optimizer's) and state are those of the newest checkpoint."""

    folder: Path

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in step_metrics.read(self.folder) if "loss" in line]

    @property
    def valid_losses(self) -> list[float]:
        return [line["valid_loss"] for line in step_metrics.read(self.folder) if "valid_loss" in line]

    @property
    def grad_norms(self) -> list[float]:
        """The norm of each step's gradient, before clipping."""
        return [line["grad_norm"] for line in step_metrics.read(self.folder) if "loss" in line]

    @property
    def seen(self) -> list[dict[str, Any]]:
        """Each process's memory and connections, as run_sessions.py describes them."""
        return [json.loads(path.read_text(encoding="utf-8")) for path in self.folder.glob("seen_*.json")]

    @property
    def weights(self) -> dict[str, Any]:
        return dict(read_weights(self._newest))

    @property
    def moments(self) -> dict[str, Any]:
        return dict(read_moments(self._newest))

    @property
    def state(self) -> TrainingState:
        return read_state(self._newest)

    @property
    def _newest(self) -> Path:
        return self.folder / (self.folder / "latest").read_text(encoding="utf-8").strip()


def assert_same_bits(found: Trained, expected: Trained) -> None:
    """Assert that two runs have the same losses, weights and optimizer state, bit for bit."""
    assert found.losses == expected.losses and found.valid_losses == expected.valid_losses
    for part in ("weights", "moments"):
        tensors, others = getattr(found, part), getattr(expected, part)
        assert tensors.keys() == others.keys()
        for name, tensor in others.items():
            assert tensor.dtype == torch.float32 and torch.equal(tensors[name], tensor), name


@pytest.fixture(scope="session")
def train_runs(
    tiny_data: dict[str, str], warm_server: Path | None, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Trained]]:
    """Return a function that trains several runs, name → overrides, one after another in `processes` processes.

    It returns the runs that succeeded: one that fails takes its own test cases with it, and no others.
    """

    def run(runs: dict[str, dict[str, Any]], processes: int = 1, folder: Path | None = None) -> dict[str, Trained]:
        place = folder or tmp_path_factory.mktemp("runs")
        jobs = [
            {"output_model_dir": str(place / name), "num_processes": processes, **overrides}
            for name, overrides in runs.items()
        ]
        job_file, names, succeeded = place / "jobs.json", list(runs), []
        while jobs:
            job_file.write_text(json.dumps({"config": tiny_data["config"], "jobs": jobs}), encoding="utf-8")
            done_file = job_file.with_suffix(".done")
            done_file.write_text("", encoding="utf-8")
            command = [warm.python_of(warm_server), "-m", "programs", "run_sessions", str(processes), str(job_file)]
            code = subprocess.run(command, check=False).returncode
            num_done = done_file.read_text(encoding="utf-8").count("\n")
            assert code == 0 or num_done < len(jobs), f"all runs are done, but the processes ended with {code}"
            succeeded += names[:num_done]
            jobs, names = jobs[num_done + 1 :], names[num_done + 1 :]  # without the one that failed
        return {name: Trained(place / name) for name in succeeded}

    return run


@pytest.fixture(scope="session", autouse=True)
def python_path() -> None:
    """Let the started processes find the package, `run_sessions`, and `faults.forge`."""
    places = [ROOT / "original_codes", *(ROOT / "tests" / part for part in ("numerics", "support", ""))]
    paths = [*map(str, places), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
