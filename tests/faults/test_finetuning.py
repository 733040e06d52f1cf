"""Fine-tuning under the faults of training, and under those of its own: in answering, the examples and the test."""

import copy
import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import made_tasks
import pytest
import warm
from faults.running import Forge, assert_equal, trained_unbroken, whole_checkpoints
from faults.test_full_disk import Disk, small
from tiny import Trained

from zerokara import checkpoint
from zerokara.base import manifest
from zerokara.checkpoint.folders import SELECTION_FACT
from zerokara.config.finetune_config import FinetuneConfig
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.finetuning.task import ANSWERS_NAME, RESULT_NAME, prepared
from zerokara.training.monitoring import step_metrics

__all__ = ["small"]
pytestmark = pytest.mark.usefixtures("warm_python")

SETTINGS: dict[str, Any] = {
    "epochs": 7, "lr": 3e-3, "min_lr": 3e-4, "global_batch_size": 4, "micro_batch_size": 2, "packed_length": 64,
    "precision": "fp32", "plots": "false", "tensorboard": "false", "log_interval": 1, "eval_interval": 4,
    "save_interval": 2, "keep_last": 2, "eval_examples": 12, "eval_batch_size": 4, "zero_stage": 0,
}  # fmt: skip
"""Many small steps, a save every other one, and answers to examples every fourth."""


def config_of(task: Path, **settings: object) -> FinetuneConfig:
    chosen = {**SETTINGS, **settings}
    return load(FinetuneConfig, task, [f"{key}={value}" for key, value in chosen.items()])


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration for a task of two labels; its examples are not prepared."""
    folder = tmp_path_factory.mktemp("task")
    made_tasks.make_folder(folder / "model", made_tasks.make_tokenizer(folder), PretrainConfig(**made_tasks.SIZES))
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
    prepared(config_of(task))
    made = copy.copy(forge)
    made.settings, made.step = {"config": str(task)}, "finetune"
    return made


@pytest.fixture(scope="module")
def tuned(tuning: Forge, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The fine-tuning that nothing befell, not yet tested."""
    trained = trained_unbroken(tuning, tmp_path_factory.mktemp("tuned") / "run", settings=SETTINGS)
    assert len([line for line in step_metrics.read(trained.folder) if "valid_accuracy" in line]) > 4
    return trained


@pytest.mark.slow
def test_sigterm_while_answering_is_obeyed_at_the_edge_of_a_step(tuning: Forge, tuned: Trained, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def is_selected() -> bool:
        return manifest.read(run_dir / "global_step4" / "manifest.json").facts[SELECTION_FACT] is not None

    signals = {"signal": {"number": signal.SIGTERM, "where": "answering"}}
    assert tuning.run(run_dir, signals, **SETTINGS) == 0, tuning.log
    assert "SIGTERM" in tuning.log and whole_checkpoints(run_dir)[-1] == tuning.values("step")[-1] == 4
    # The validation was given up, and is made up for.
    assert [line["step"] for line in step_metrics.read(run_dir) if "valid_accuracy" in line] == [0]
    assert not is_selected()
    assert tuning.run(run_dir, **{**SETTINGS, "keep_last": 99}) == 0, tuning.log
    assert_equal(run_dir, tuned)
    assert (run_dir / "best").read_text(encoding="utf-8") == (tuned.folder / "best").read_text(encoding="utf-8")
    assert is_selected(), "the metric of that step's weights became known, and they were the best so far"


@pytest.mark.slow
def test_a_test_that_finds_the_disk_full_is_made_again(tuning: Forge, small: Disk, tuned: Trained) -> None:
    """Nothing of it stays but the message; the same command tests again, and the result is that of the first time."""
    best = checkpoint.best(tuned.folder)
    assert best is not None and tuning.run(tuned.folder, work=("test", str(best)), **SETTINGS) == 0, tuning.log
    expected = {name: (tuned.folder / name).read_bytes() for name in (RESULT_NAME, ANSWERS_NAME)}
    shutil.copytree(tuned.folder, small.seen, ignore=shutil.ignore_patterns(*expected))
    test = ("test", str(small.run_dir / best.name))
    small.fill()
    assert tuning.run(small.run_dir, work=test, **SETTINGS) == 1
    assert "No space left on device" in tuning.log and "Traceback" not in tuning.log, tuning.log
    assert not any((small.seen / name).exists() for name in expected)
    small.clear()
    assert tuning.run(small.run_dir, work=test, **SETTINGS) == 0, tuning.log
    assert {name: (small.seen / name).read_bytes() for name in expected} == expected


def test_killed_while_the_examples_are_prepared(task: Path, tuning: Forge, tmp_path: Path) -> None:
    """They are prepared anew, equal to those that nobody disturbed, and nothing is left behind."""
    prefix = tmp_path / "examples"
    body = (
        "import os, signal, sys\n"
        "from zerokara.config.finetune_config import FinetuneConfig\n"
        "from zerokara.config.loading import load\n"
        "from zerokara.examples.preparation import _Splitter\n"
        "from zerokara.finetuning.task import prepared\n"
        "_Splitter._add = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "prepared(load(FinetuneConfig, sys.argv[1], ['output_prefix=' + sys.argv[2]]))\n"
    )
    killed = subprocess.run([warm.python(), "-c", body, str(task), str(prefix)], check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert list(tmp_path.glob("*.partial")) and not list(tmp_path.glob("*.bin"))
    prepared(config_of(task, output_prefix=prefix))
    assert not list(tmp_path.glob("*.partial"))
    names = [f"_{split}{end}" for split in ("train", "valid", "test") for end in (".bin", ".idx")]
    undisturbed = [Path(f"{task.parent / 'examples'}{name}").read_bytes() for name in names]
    assert [Path(f"{prefix}{name}").read_bytes() for name in names] == undisturbed and all(undisturbed)
