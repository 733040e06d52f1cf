"""Fine-tuning under the faults of training, and under those of its own: in answering, the examples and the test."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_tasks
import pytest
import warm
from faults.running import Forge, Kills, assert_equal, trained_unbroken, whole_checkpoints
from faults.test_full_disk import Disk, small
from tiny import ROOT, Trained

from zerokara import checkpoint, manifest
from zerokara.checkpoint.folders import SELECTION_FACT
from zerokara.finetuning.task import ANSWERS_NAME, RESULT_NAME
from zerokara.training.monitoring import step_metrics

__all__ = ["small"]
pytestmark = pytest.mark.usefixtures("warm_python")

SETTINGS: dict[str, Any] = {
    "epochs": 7, "lr": 3e-3, "min_lr": 3e-4, "global_batch_size": 4, "micro_batch_size": 2, "packed_length": 64,
    "precision": "fp32", "plots": "false", "tensorboard": "false", "log_interval": 1, "eval_interval": 4,
    "save_interval": 2, "keep_last": 2, "eval_examples": 12, "eval_batch_size": 4, "zero_stage": 0,
}  # fmt: skip
"""Many small steps, a save every other one, and answers to examples every fourth."""
KILLS = 3


def command(config: Path, **settings: object) -> list[str]:
    chosen = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return ["bash", str(ROOT / "7_finetune.sh"), "--config", str(config), *chosen]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration for a task of two labels; its examples are not prepared."""
    folder = tmp_path_factory.mktemp("task")
    made_tasks.make_folder(folder / "model", made_tasks.make_tokenizer(folder))
    for name, count, seed in (("train", 130, 1), ("valid", 30, 2), ("test", 40, 3)):
        (folder / f"{name}.tsv").write_text(made_tasks.label_lines(count, seed), encoding="utf-8")
    named = {f"{name}_data": [str(folder / f"{name}.tsv")] for name in ("train", "valid", "test")}
    named |= {"init_from": str(folder / "model"), "output_prefix": str(folder / "examples")}  # type: ignore[dict-item]
    named |= {"label_words": made_tasks.LABELS, "metric": "accuracy"}  # type: ignore[dict-item]
    config = folder / "finetune_config.yaml"
    config.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in named.items()), encoding="utf-8")
    return config


@pytest.fixture(scope="module")
def tuning(forge: Forge, task: Path) -> Forge:
    """Training processes of step 7, whose examples are there."""
    done = subprocess.run(
        [*command(task, **SETTINGS), "--dry-run"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return replace(forge, settings={"config": str(task)}, step="finetune")


@pytest.fixture(scope="module")
def tuned(tuning: Forge, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The fine-tuning that nothing befell, not yet tested."""
    trained = trained_unbroken(tuning, tmp_path_factory.mktemp("tuned") / "run", settings=SETTINGS)
    assert len([line for line in step_metrics.read(trained.folder) if "valid_accuracy" in line]) > 4
    return trained


def test_killed_at_random_moments(tuning: Forge, tuned: Trained, tmp_path: Path) -> None:
    """In the start, in a step, in answering, in a save."""
    chance, started = random.Random(4), time.monotonic()
    trained_unbroken(tuning, tmp_path / "timed", settings=SETTINGS)
    seconds = time.monotonic() - started

    def kill(run_dir: Path) -> int:
        tuning.start(run_dir, **SETTINGS)
        time.sleep(chance.uniform(0, 0.9 * seconds))
        return tuning.kill()

    (tmp_path / "killed").mkdir()
    Kills(tuning, tuned, tmp_path / "killed", SETTINGS).survive(KILLS, kill)


def test_sigterm_in_answering_is_obeyed_at_the_edge_of_a_step(tuning: Forge, tuned: Trained, tmp_path: Path) -> None:
    run_dir, record = tmp_path / "run", tmp_path / "run" / "global_step4" / "manifest.json"
    # the answering is given up, and made up for
    fault = {"signal": {"number": signal.SIGTERM, "where": "answering"}}
    assert tuning.run(run_dir, fault, **SETTINGS) == 0 and "SIGTERM" in tuning.log, tuning.log
    assert tuning.values("step")[-1] == whole_checkpoints(run_dir)[-1] == 4
    assert manifest.read(record).facts[SELECTION_FACT] is None
    assert [line["step"] for line in step_metrics.read(run_dir) if "valid_accuracy" in line] == [0]
    assert tuning.run(run_dir, **{**SETTINGS, "keep_last": 99}) == 0, tuning.log
    assert_equal(run_dir, tuned)
    assert (run_dir / "best").read_text(encoding="utf-8") == (tuned.folder / "best").read_text(encoding="utf-8")
    # The metric of that step's weights became known, and they were the best so far.
    assert manifest.read(record).facts[SELECTION_FACT] is not None


def test_a_test_that_finds_the_disk_full_is_made_again(tuning: Forge, small: Disk, tuned: Trained) -> None:
    """Nothing of it stays but the message; the same command tests again, and the result is that of the first time."""
    test = ("test", str(checkpoint.best(tuned.folder)))
    assert tuning.run(tuned.folder, work=test, **SETTINGS) == 0, tuning.log
    expected = {name: (tuned.folder / name).read_bytes() for name in (RESULT_NAME, ANSWERS_NAME)}
    assert tuning.run(small.run_dir, **SETTINGS) == 0, tuning.log
    test = ("test", str(small.run_dir / checkpoint.best(tuned.folder).name))  # type: ignore[union-attr]
    small.fill()
    assert tuning.run(small.run_dir, work=test, **SETTINGS) == 1
    assert "No space left on device" in tuning.log and "Traceback" not in tuning.log, tuning.log
    assert not any((small.seen / name).exists() for name in expected)
    small.clear()
    assert tuning.run(small.run_dir, work=test, **SETTINGS) == 0, tuning.log
    assert {name: (small.seen / name).read_bytes() for name in expected} == expected


def test_killed_while_the_examples_are_prepared(task: Path, tuning: Forge, tmp_path: Path) -> None:
    """A second start prepares them anew, equal to undisturbed ones, and leaves nothing behind."""
    prefix = tmp_path / "examples"
    body = (
        "import os, signal\n"
        "from zerokara.examples.preparation import _Splitter\n"
        "from zerokara.steps import finetune\n"
        "import sys\n"
        "_Splitter._add = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "finetune.main(sys.argv[1:])\n"
    )
    arguments = [
        *command(task, **SETTINGS, output_prefix=prefix, output_model_dir=tmp_path / "run")[2:],
        "--dry-run",
    ]
    killed = subprocess.run([warm.python(), "-c", body, *arguments], check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert list(tmp_path.glob("*.partial")) and not list(tmp_path.glob("*.bin"))
    again = subprocess.run(
        ["bash", str(ROOT / "7_finetune.sh"), *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert again.returncode == 0, again.stderr
    assert not list(tmp_path.glob("*.partial"))
    undisturbed = task.parent / "examples"
    names = [f"_{split}{end}" for split in ("train", "valid", "test") for end in (".bin", ".idx")]
    assert all(Path(f"{prefix}{end}").read_bytes() == Path(f"{undisturbed}{end}").read_bytes() for end in names)
    assert os.path.getsize(f"{prefix}_train.bin") > 0
