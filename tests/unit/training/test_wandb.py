"""Weights & Biases, with the real library without a network: it records, and it can never stop a training."""

import getpass
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from configs import config_of

from zerokara.training.monitoring import step_metrics
from zerokara.training.monitoring.step_metrics import Recorder, WeightsAndBiases

KEY = "0123456789abcdef0123456789abcdef01234567"
HOST = "the-name-of-this-machine"
LOSS = 731946.5
"""So long a number does not occur by chance among the times and sizes that a transaction log holds."""


@pytest.fixture(autouse=True)
def fresh_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """wandb reads the environment once in a process; here it does for each test."""
    import wandb

    wandb.teardown()
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    yield
    wandb.teardown()


def open_recorder(run_dir: Path, mode: str, resumed_step: int) -> Recorder:
    """A recorder for a run all of whose paths lie in its folder."""
    settings = config_of(
        wandb=mode, sample_prompts=["and/or"], stages=[{"tokens": 100, "source_weights": [1]}],
        input_jsonl=[f"{run_dir}/a.jsonl"], output_prefix=run_dir / "tokens", init_from=run_dir / "hf",
        output_model_dir=run_dir, input_tokenizer_file=run_dir / "t.model",
    )  # fmt: skip
    return Recorder(run_dir, resumed_step, {"wandb": lambda: WeightsAndBiases(run_dir, resumed_step, settings)})


def assert_nothing_of_the_machine(sent: bytes, folder: Path) -> None:
    """See that no folder, host, interpreter, program or repository is sent: online, what is recorded offline is."""
    own = [folder.name, sys.prefix, sys.executable, sys.argv[0], str(Path.home()), str(Path.cwd()), HOST]
    own += [name for name in (socket.gethostname(), getpass.getuser()) if len(name) > 5]  # shorter ones occur by chance
    for name in own:
        assert name.encode() not in sent, f"{name}: {sent[max(0, sent.find(name.encode()) - 99) :][:200]!r}"


def record(run_dir: Path, mode: str, resumed_step: int, last: int) -> None:
    recorder = open_recorder(run_dir, mode, resumed_step)
    for step in range(resumed_step + 1, last + 1):
        recorder.record({"step": step, "tokens": 10 * step, "loss": LOSS + step})
    recorder.show(last, {"samples": "**once** <upon>"})
    recorder.close()


def steps_recorded(part: Path) -> list[int]:
    """The steps in a transaction log: each has a loss that no other has."""
    content = b"".join(path.read_bytes() for path in part.glob("*.wandb"))
    return [step for step in range(1, 40) if f"{LOSS + step}".encode() in content]


@pytest.mark.slow
def test_offline_no_step_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]) -> None:
    import wandb

    record(tmp_path, "offline", 0, 20)
    first = set(tmp_path.glob("wandb/offline-run-*"))
    time.sleep(1.1)  # wandb names its folders by the second
    record(tmp_path, "offline", 12, 30)  # killed and resumed: 13 to 20 are recorded already
    (second,) = set(tmp_path.glob("wandb/offline-run-*")) - first
    (only,) = first
    assert messages == []
    wandb.teardown()  # its service writes the last of a run's records when it ends, as it does with the process
    assert only.name.rpartition("-zerokara-")[2] == second.name.rpartition("-zerokara-")[2] != ""
    assert steps_recorded(only) == list(range(1, 21)) and steps_recorded(second) == list(range(21, 31))
    assert [line["step"] for line in step_metrics.read(tmp_path)] == list(range(1, 31))
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert KEY.encode() not in file.read_bytes(), f"the key stands in {file}"
    sent = [file for file in first.pop().rglob("*") if file.is_file() and file.parent.name != "logs"]
    assert any(file.suffix == ".wandb" for file in sent)
    monkeypatch.undo()
    everything = b"".join(file.read_bytes() for file in sent)
    assert b"a.jsonl" in everything and b"and/or" in everything
    assert_nothing_of_the_machine(everything, tmp_path.parent)


@pytest.mark.slow
def test_a_new_run_is_another_at_wandb(tmp_path: Path, messages: list[str]) -> None:
    """A start that died before its first checkpoint binds nobody: the next may have other settings."""
    record(tmp_path, "offline", 0, 20)
    first = set(tmp_path.glob("wandb/offline-run-*"))
    time.sleep(1.1)
    record(tmp_path, "offline", 0, 5)
    (second,) = set(tmp_path.glob("wandb/offline-run-*")) - first
    import wandb

    wandb.teardown()
    assert messages == [] and steps_recorded(second) == list(range(1, 6))
    assert first.pop().name.rpartition("-zerokara-")[2] != second.name.rpartition("-zerokara-")[2]


def test_only_the_last_name_of_a_path_is_shared() -> None:
    given = {"a": "/srv/ada/x.jsonl", "b": ["data/", "hf://datasets/ada/poems@v1", 3, None], "sample_prompts": ["a/b"]}
    given |= {"stages": [{"order": "shuffle"}], "c": "https://ada:secret@host/f.json?token=1"}
    assert step_metrics.shared(given) == {
        "a": "x.jsonl", "b": ["data", "poems@v1", 3, None], "sample_prompts": ["a/b"], "stages": [{"order": "shuffle"}],
        "c": "f.json?…",
    }  # fmt: skip


@pytest.mark.slow
def test_an_absent_server_stops_nothing_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(step_metrics, "SERVER_SECONDS", 2)
    record(tmp_path, "online", 0, 3)
    (message,) = messages
    assert message.startswith("wandb: ") and "127.0.0.1:9" in message and KEY not in message
    wandb.teardown()  # its service writes the last records
    (kept,) = tmp_path.glob("wandb/offline-run-*")
    assert steps_recorded(kept) == [1, 2, 3] and len(step_metrics.read(tmp_path)) == 3


def test_without_a_key_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    record(tmp_path, "online", 0, 2)
    (message,) = messages
    assert message.startswith("wandb: ") and "WANDB_API_KEY" in message
