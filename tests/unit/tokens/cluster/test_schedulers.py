"""Which scheduler is taken, what is said where it is missing, and what Slurm is asked."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import UserError
from zerokara.tokens.cluster import schedulers, slurm
from zerokara.tokens.cluster.slurm import as_array, job_name
from zerokara.tokens.workers import run_in_workers


def test_this_machine_alone_needs_none(make_config: Callable[..., PretrainConfig]) -> None:
    config = make_config()
    assert schedulers.scheduler_of(config) is None
    assert schedulers.run_tasks(config, [], None) is run_in_workers


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ("slurm", "cluster = slurm: sbatch, squeue, scancel not found here; run it on a machine of a Slurm cluster"),
        (
            "ray",
            "cluster = ray: Ray is not installed; .venv/bin/pip install --require-hashes --no-deps -r req",
        ),
    ],
)
def test_one_that_is_missing_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str, said: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"cluster: {cluster}\n", encoding="utf-8")
    monkeypatch.setenv("PATH", str(tmp_path))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find_spec(name))
    with pytest.raises(UserError) as error:
        schedulers.scheduler_of(load(PretrainConfig, path, []))
    assert str(error.value).startswith(f"{path}:1: {said}")


def test_an_array_that_may_be_at_work_is_not_forgotten_without_its_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.end_leftover(tmp_path)
    (tmp_path / "cluster.json").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=f"scancel --name={job_name(tmp_path)}"):
        slurm.end_leftover(tmp_path)
    assert (tmp_path / "cluster.json").exists()


def test_an_array_names_its_parts_briefly() -> None:
    assert as_array([0, 1, 2, 3]) == "0-3" and as_array([7]) == "7" and as_array([9, 2, 3, 4, 7]) == "2-4,7,9"


def test_a_folder_gives_its_array_a_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert job_name(tmp_path) == job_name(tmp_path / "link") != job_name(tmp_path.parent)
