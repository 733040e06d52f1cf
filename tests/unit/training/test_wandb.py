"""Weights & Biases, with the real library without a network: it records, and it can never stop a training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerokara import config
from zerokara.training.watching import metrics, weights_and_biases

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def fresh_library() -> Iterator[None]:
    """wandb reads the environment once in a process; here each test has one of its own."""
    import wandb

    wandb.teardown()
    yield
    wandb.teardown()


def settings(mode: str) -> config.PretrainConfig:
    return config.load(config.PretrainConfig, "/dev/null", ["tensorboard=false", f"wandb={mode}"])


def record(run_dir: Path, mode: str, resumed_step: int, last: int, said: list[str]) -> None:
    recorder = metrics.Recorder(run_dir, settings(mode), resumed_step, said.append)
    for step in range(resumed_step + 1, last + 1):
        recorder.record({"step": step, "tokens": 10 * step, "loss": 100.5 + step})
    recorder.text(last, "samples", "**once** <upon>")
    recorder.close()


def steps_recorded(part: Path) -> list[int]:
    """The steps in a transaction log: each stands there with its loss, which no other has."""
    content = b"".join(path.read_bytes() for path in part.glob("*.wandb"))
    return [step for step in range(1, 40) if f"{100.5 + step}".encode() in content]


@pytest.mark.slow
def test_offline_a_run_keeps_its_id_and_no_step_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    said: list[str] = []
    record(tmp_path, "offline", 0, 20, said)
    first = set(tmp_path.glob("wandb/offline-run-*"))
    time.sleep(1.1)  # wandb names its folders by the second
    record(tmp_path, "offline", 12, 30, said)  # cut short and resumed: 13 to 20 are there already
    (second,) = set(tmp_path.glob("wandb/offline-run-*")) - first
    (only,) = first
    assert said == []
    wandb.teardown()  # its service writes the last of a run's records when it ends, as it does with the process
    assert only.name.rpartition("-zerokara-")[2] == second.name.rpartition("-zerokara-")[2] != ""
    assert steps_recorded(only) == list(range(1, 21)) and steps_recorded(second) == list(range(21, 31))
    assert [line["step"] for line in metrics.read(tmp_path)] == list(range(1, 31))
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert KEY.encode() not in file.read_bytes(), f"the key stands in {file}"


@pytest.mark.slow
def test_a_server_that_cannot_be_reached_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(weights_and_biases, "INIT_SECONDS", 2)
    said: list[str] = []
    began = time.monotonic()
    recorder = metrics.Recorder(tmp_path, settings("online"), 0, said.append)
    recorder.record({"step": 1, "tokens": 10, "loss": 2.0})
    assert time.monotonic() - began < 1, "the training waited"
    recorder.close()
    assert len(said) == 1 and "127.0.0.1:9" in said[0] and said[0].endswith("going on without it")
    assert KEY not in said[0] and len(metrics.read(tmp_path)) == 1


def test_whatever_it_raises_the_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    class Failing:
        def log(self, *_: object, **__: object) -> None:
            raise wandb.errors.CommError("the\nserver is gone")

    monkeypatch.setattr(wandb, "init", lambda **_: Failing())
    said: list[str] = []
    record(tmp_path, "offline", 0, 3, said)
    assert said == ["wandb: the server is gone; going on without it"]
    assert len(metrics.read(tmp_path)) == 3


def test_without_a_key_there_is_a_word_and_no_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    said: list[str] = []
    record(tmp_path, "online", 0, 2, said)
    assert len(said) == 1 and said[0].startswith("wandb: no API key: put it into WANDB_API_KEY")
