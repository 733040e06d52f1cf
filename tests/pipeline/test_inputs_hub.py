"""A Hub dataset as input of step 2, against a Hub on loopback: the documents of its files, and every way to fail."""

import gzip
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_tokens
import pytest
from corpus_files import json_lines, parquet
from pipeline import hub_server

from zerokara.base import manifest
from zerokara.config.pretrain_config import PretrainConfig

NAME = "ada/poems"
READER = """
import json, os, sys
from zerokara.corpus import find, read
from zerokara.corpus.format_check import check_formats
from zerokara.base.errors import RunError, UserError

assert "huggingface_hub" not in sys.modules and "pyarrow" not in sys.modules
import functools
from huggingface_hub import constants, hf_file_system
from huggingface_hub.utils import http_backoff
hf_file_system.http_backoff = functools.partial(http_backoff, base_wait_time=0.01)
constants.HF_HUB_ETAG_TIMEOUT = float(os.environ.get("PATIENCE", constants.HF_HUB_ETAG_TIMEOUT))
size, *entries = sys.argv[1:]
try:
    files = find.find_files(entries, "config.yaml:3")
    check_formats(files, "text", "line", "config.yaml:4")
    told = [str(file) for file in find.for_manifest(files)]
    documents = [item.text for item in read.read_files(files, "reading", "text", "line", int(size))]
    print(json.dumps({"files": told, "documents": documents}))
except (UserError, RunError) as error:
    sys.exit(f"{type(error).__name__}: {error}")
except OSError as error:
    sys.exit(f"OSError: {error.filename}: {error.strerror}")
"""


def _texts(first: int, count: int) -> list[str]:
    return [f"poem {number}: {'日本語の詩 ' * (number % 7)}" for number in range(first, first + count)]


FILES = {
    ".gitattributes": b"",
    "README.md": b"# poems",
    "dataset_infos.json": b"{}",
    "LICENSE.txt": b"free",
    "data/train/b.jsonl.gz": gzip.compress(json_lines(_texts(1000, 300))),
    "data/train/a.jsonl": json_lines(_texts(0, 400)),
    "data/train/c.parquet": parquet(60, text=_texts(2000, 500), other=["x" * 50] * 500),
    "data/test/a.jsonl": json_lines(_texts(5000, 3)),
    "日本 語/d.txt": "一行目\n二行目\n".encode(),
}
TRAIN = _texts(0, 400) + _texts(1000, 300) + _texts(2000, 500)


@pytest.fixture
def hub() -> Iterator[Any]:
    state = hub_server.Hub(datasets={NAME: hub_server.Dataset(dict(FILES))})
    with hub_server.running(state) as running:
        yield running


class User:
    """Someone who reads a corpus; `read` gives what came of it."""

    def __init__(self, root: Path, place: Path, url: str):
        self.root, self.place, self.url = root, place, url
        self.seconds = 0.0

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        environment["PYTHONPATH"] = str(self.root / "original_codes")
        started = time.monotonic()
        run = hub_server.run([sys.executable, *arguments], self.place, self.url, **environment)
        self.seconds = time.monotonic() - started
        return run

    def read(self, *entries: str, size: int = 4000, **environment: str) -> Any:
        run = self.run("-c", READER, str(size), *entries, **environment)
        return json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else run.stderr.strip()


@pytest.fixture
def user(root: Path, tmp_path: Path, hub: Any) -> User:
    return User(root, tmp_path, hub.url)


def test_step_2_writes_what_a_disks_files_give_and_sees_a_change(
    user: User, hub: Any, tiny_data: dict[str, str]
) -> None:
    for path in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        (user.place / path).write_bytes(FILES[f"data/train/{path}"])
    local = {"input_jsonl": [str(user.place)], "output_prefix": str(user.place / "local" / "t")}
    config = PretrainConfig(**local, input_tokenizer_file=tiny_data["input_tokenizer_file"])  # type: ignore[arg-type]
    made_tokens.encode(config)
    made_tokens.discard_work(config)
    settings = [f"input_jsonl=[hf://datasets/{NAME}/data/train]", "output_prefix=remote/t", "num_workers=2"]
    settings.append(f"input_tokenizer_file={tiny_data['input_tokenizer_file']}")
    (user.place / "config.yaml").touch()
    step = ["-m", "zerokara.steps", "tokenize", *(word for setting in settings for word in ("--set", setting))]
    first = user.run(*step)
    assert "1,200 documents in, 0 skipped" in first.stdout, first.stderr
    prefix = user.place / "remote" / "t_text_document"
    made = {path.name: path.read_bytes() for path in prefix.parent.iterdir() if path.suffix != ".json"}
    assert made == made_tokens.written(config) and len(made) == 4
    record = manifest.read(prefix.with_name(f"{prefix.name}.manifest.json")).inputs["input_jsonl"][0]
    assert record.path == f"hf://datasets/{NAME}@{hub.datasets[NAME].sha}/data/train/a.jsonl"
    assert record.sha256 == hashlib.sha256(FILES["data/train/a.jsonl"]).hexdigest()
    assert "done already" in user.run(*step).stdout
    hub.datasets[NAME].files["data/train/a.jsonl"] += b'{"text": "one more"}\n'
    changed = user.run(*step)
    assert changed.returncode == 2 and "input_jsonl = 3 files" in changed.stderr


def test_of_a_parquet_only_the_column_with_the_text_is_fetched(user: User, hub: Any) -> None:
    heavy = [os.urandom(2_000_000)]
    hub.datasets["ada/images"] = hub_server.Dataset({"a.parquet": parquet(1, image=heavy, text=["a word"], mask=heavy)})
    assert user.read("hf://datasets/ada/images")["documents"] == ["a word"]
    assert hub.bytes_sent < 1_000_000


def test_what_an_entry_may_name(user: User) -> None:
    base = f"hf://datasets/{NAME}"
    (user.place / "list.txt").write_text(f"# from the Hub\n{base}/data/test\n", encoding="utf-8")
    several = user.read("@list.txt", f"{base}@v1/data/**/*.gz", f"{base}@refs/convert/parquet/日本 語/d.txt")
    assert several["documents"] == [*_texts(5000, 3), *_texts(1000, 300), "一行目", "二行目"]
    assert "git:" in several["files"][0]  # small: in git, known by its blob
    everything = user.read(base, size=1 << 20)
    assert len(everything["documents"]) == 3 + len(TRAIN) + 2 and len(everything["files"]) == 5


def test_what_is_not_there_is_told_entry_by_entry(user: User, hub: Any) -> None:
    hub.datasets["ada/gated"] = hub_server.Dataset({"a.jsonl": FILES["data/train/a.jsonl"]}, gated=True)
    hub.datasets["ada/secret"] = hub_server.Dataset({"a.jsonl": json_lines(["told to friends"])}, private=True)
    hub.datasets["ada/empty"] = hub_server.Dataset({"README.md": b"soon"})
    base = f"hf://datasets/{NAME}"
    wanted = {
        "hf://datasets/poems": "write hf://datasets/owner/name", "hf://datasets/ada/nothing": "names no dataset",
        f"{base}@v7": "revision", f"{base}/data/valid": "/data holds test, train",
        "hf://datasets/ada/empty": "conversion", "hf://datasets/ada/secret": "names no dataset",
    }  # fmt: skip
    told = user.read(*wanted)
    lines = told.removeprefix("UserError: ").splitlines()
    for line, (entry, words) in zip(lines, wanted.items(), strict=True):
        assert line.startswith(f"config.yaml:3: {entry}") and words in line, told
    gated = user.read("hf://datasets/ada/gated")
    assert gated.startswith("RunError: cannot read hf://datasets/ada/gated") and "agree on its page at http" in gated
    both = user.read("hf://datasets/ada/secret", "hf://datasets/ada/gated", HF_TOKEN=hub_server.TOKEN)
    assert len(both["documents"]) == 1 + 400


@pytest.mark.slow
def test_a_connection_that_breaks_and_a_hub_that_is_asked_too_often_are_waited_for(user: User, hub: Any) -> None:
    hub.drop_at, hub.num_drops = 6000, 2
    assert user.read(f"hf://datasets/{NAME}/data/train")["documents"] == TRAIN and hub.num_drops == 0
    hub.too_often = 2
    assert user.read(f"hf://datasets/{NAME}/data/test")["documents"] == _texts(5000, 3)
    assert hub.too_often == 0 and user.seconds > 2


@pytest.mark.parametrize("name", ["a.jsonl", "c.parquet"])
def test_a_connection_that_breaks_for_good_is_an_error_and_no_shorter_text(user: User, hub: Any, name: str) -> None:
    hub.drop_at = len(FILES[f"data/train/{name}"]) - 10
    told = user.read(f"hf://datasets/{NAME}/data/train/{name}")
    assert told.startswith(("OSError: hf://", "RunError: cannot read hf://"))
    assert f"/data/train/{name}: reading bytes " in told and "cannot be reached" in told
    assert hub.num_drops <= 1_000_000 - 4


def test_no_signature_token_or_password_is_told(user: User, hub: Any) -> None:
    hub.fail_storage, hub.quotes = 403, True
    told = user.read(f"hf://datasets/{NAME}/data/train/a.jsonl", HF_TOKEN=hub_server.TOKEN)
    assert "status 403" in told and "was the answer to http" in told
    assert hub_server.SIGNATURE not in told and "X-Amz" not in told and hub_server.TOKEN not in told
    user.url = hub.url.replace("://", "://ada:pass-word@") + "/elsewhere"
    told = user.read(f"hf://datasets/{NAME}/data/train/a.jsonl")
    assert told.startswith("RunError") and "answered with status 401" in told and "pass-word" not in told


def test_the_token_goes_to_the_hub_alone(user: User, hub: Any) -> None:
    hub.next_page_at = hub.url.replace("127.0.0.1", "localhost")
    assert len(user.read(f"hf://datasets/{NAME}", HF_TOKEN=hub_server.TOKEN)["files"]) == 5


@pytest.mark.slow
def test_no_network_offline_mode_and_a_server_that_never_answers_are_told_within_seconds(user: User) -> None:
    told = user.read(f"hf://datasets/{NAME}", HF_HUB_OFFLINE="1")
    assert "RunError: config.yaml:3: hf://" in told and "HF_HUB_OFFLINE is set" in told
    with socket.socket() as server:  # bound and not listening: nothing else can take the port
        server.bind(("127.0.0.1", 0))
        user.url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert "cannot be reached" in user.read(f"hf://datasets/{NAME}") and user.seconds < 10
        server.listen()
        told = user.read(f"hf://datasets/{NAME}", PATIENCE="1")
    assert "cannot be reached (ReadTimeout" in told and user.seconds < 8
