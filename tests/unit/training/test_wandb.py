"""Weights & Biases, with the real library without a network: it records, and it can never stop a training."""

from __future__ import annotations

import getpass
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.training.monitoring import metrics, weights_and_biases

KEY = "0123456789abcdef0123456789abcdef01234567"
HOST = "the-name-of-this-machine"


@pytest.fixture(autouse=True)
def fresh_library() -> Iterator[None]:
    """wandb reads the environment once in a process; here each test has one of its own."""
    import wandb

    wandb.teardown()
    yield
    wandb.teardown()


def settings(mode: str, place: Path | None = None) -> PretrainConfig:
    """With paths below `place`, if there is one."""
    given = ["tensorboard=false", f"wandb={mode}", "sample_prompts=[and/or]"]
    if place:
        stages = "[{tokens: 100, source_weights: [1]}]"
        given += [f"input_jsonl=[{place}/a.jsonl]", f"output_prefix={place}/tokens/", f"init_from={place}/hf"]
        given += [f"output_model_dir={place}", f"input_tokenizer_file={place}/t.model", f"stages={stages}"]
    return load(PretrainConfig, "/dev/null", given)


def assert_nothing_of_the_machine(sent: bytes, place: Path) -> None:
    """No folder, host, interpreter, program or repository stands in what goes out."""
    own = [place.name, sys.prefix, sys.executable, sys.argv[0], str(Path.home()), str(Path.cwd()), HOST]
    own += [name for name in (socket.gethostname(), getpass.getuser()) if len(name) > 5]  # shorter ones stand anywhere
    for name in own:
        assert name.encode() not in sent, f"{name}: {sent[max(0, sent.find(name.encode()) - 99) :][:200]!r}"


def record(run_dir: Path, mode: str, resumed_step: int, last: int, said: list[str]) -> None:
    recorder = metrics.Recorder(run_dir, settings(mode, run_dir), resumed_step, said.append)
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
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
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
    sent = [file for file in first.pop().rglob("*") if file.is_file() and file.parent.name != "logs"]
    assert any(file.suffix == ".wandb" for file in sent)
    monkeypatch.undo()
    assert_nothing_of_the_machine(b"".join(file.read_bytes() for file in sent), tmp_path.parent)


class Receiver(BaseHTTPRequestHandler):
    """A server of W&B's that keeps all that it is sent, and answers what a run needs to begin and end."""

    received: list[bytes]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.received.append(f"{self.path} {self.headers}".encode() + body)
        asked = json.loads(body) if self.path == "/graphql" else {"query": ""}
        answers: dict[str, Any] = {}
        if "UpsertBucket" in asked["query"]:
            project = {"id": "p", "name": "zerokara", "entity": {"id": "e", "name": "ada"}}
            bucket = {"id": "b", "name": "one", "displayName": "one", "historyLineCount": 0, "project": project}
            answers["upsertBucket"] = {"bucket": bucket, "inserted": True}
        if "CreateRunFiles" in asked["query"]:
            place = f"http://{self.headers['Host']}/up/"
            files = [{"name": name, "uploadUrl": place + name} for name in asked["variables"]["files"]]
            answers["createRunFiles"] = {"runID": "b", "uploadHeaders": [], "files": files}
        content = json.dumps({"data": answers}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_PUT = do_POST


def test_online_nothing_of_the_machine_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[bytes] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Receiver,), {"received": received}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    run_dir, said = tmp_path / "first", []
    run_dir.mkdir()
    record(run_dir, "online", 0, 3, said)
    server.shutdown()
    server.server_close()
    monkeypatch.undo()
    everything = b"\n".join(received)
    assert said == [] and b"/up/config.yaml" in everything and b"103.5" in everything
    assert b"a.jsonl" in everything and b"and/or" in everything and b"first" in everything
    assert_nothing_of_the_machine(everything, tmp_path)


def test_of_a_path_the_last_name_is_shared() -> None:
    given = {"a": "/srv/ada/x.jsonl", "b": ["data/", "hf://datasets/ada/poems@v1", 3, None], "sample_prompts": ["a/b"]}
    given |= {"stages": [{"order": "shuffle"}], "c": "https://ada:secret@host/f.json?token=1"}
    assert weights_and_biases.shared(given) == {
        "a": "x.jsonl", "b": ["data", "poems@v1", 3, None], "sample_prompts": ["a/b"], "stages": [{"order": "shuffle"}],
        "c": "f.json?…",
    }  # fmt: skip


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
