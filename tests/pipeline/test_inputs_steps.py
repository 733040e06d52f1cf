"""Steps 1 and 2 over every kind of input, as a user starts them: the same text gives the same files, byte for byte."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import os
import random
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zerokara import manifest
from zerokara.corpus.compressed import zstd_module

NAME = "ada/poems"


def _load_server() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hub_server_for_steps", Path(__file__).with_name("hub_server.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["hub_server_for_steps"] = module
    spec.loader.exec_module(module)
    return module


hub_server = _load_server()


def _files() -> dict[str, bytes]:
    """The same kind of text in each format, 300 documents a file."""
    draw, zstd = random.Random(1), zstd_module()
    words = ["river", "stone", "cloud", "日本", "言語", "の", "dağ", "și"]
    noise = string.ascii_lowercase + "あいうえお"
    texts = [" ".join(draw.choices(words, k=40)) + " " + "".join(draw.choices(noise, k=60)) for _ in range(1500)]
    parts = [texts[i : i + 300] for i in range(0, 1500, 300)]
    lines = ["".join(json.dumps({"text": text}) + "\n" for text in part).encode() for part in parts]
    table = io.BytesIO()
    pq.write_table(pa.table({"id": range(300), "text": parts[3]}), table, row_group_size=50)
    return {
        "a.jsonl": lines[0],
        "b.jsonl.gz": gzip.compress(lines[1]),
        "c.jsonl.zst": zstd.compress(lines[2]),
        "d.parquet": table.getvalue(),
        "e.txt.gz": gzip.compress("".join(text + "\n" for text in parts[4]).encode()),
    }


FILES = _files()


@pytest.fixture
def hub() -> Iterator[Any]:
    with hub_server.running(hub_server.Hub(datasets={NAME: hub_server.Dataset(FILES | {"README.md": b""})})) as running:
        yield running


def _run(root: Path, place: Path, url: str, script: str, *settings: str) -> subprocess.CompletedProcess[str]:
    own = {"HF_ENDPOINT": url, "HF_HOME": str(place / "home"), "NO_PROXY": "127.0.0.1,localhost"}
    options = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "zerokara.steps", script, *options]
    environment = os.environ | own | {"PYTHONPATH": str(root / "original_codes")}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=120)


def test_a_dataset_a_folder_and_a_list_give_the_same_tokenizer_and_tokens(root: Path, tmp_path: Path, hub: Any) -> None:
    (tmp_path / "corpus").mkdir()
    for name, content in FILES.items():
        (tmp_path / "corpus" / name).write_bytes(content)
    (tmp_path / "list.txt").write_text("".join(f"corpus/{name}\n" for name in FILES), encoding="utf-8")
    (tmp_path / "sentence_piece_config.yaml").write_text("vocab_size: 400\ntxt_document: line\n", encoding="utf-8")
    (tmp_path / "config.yaml").write_text("txt_document: line\nnum_workers: 2\n", encoding="utf-8")
    made = []
    for number, entry in enumerate(["corpus", "'@list.txt'", f"hf://datasets/{NAME}"]):
        first = _run(root, tmp_path, hub.url, "train_tokenizer", f"input=[{entry}]", f"output_dir=tok{number}")
        assert first.returncode == 0, first.stderr
        settings = (
            f"input_jsonl=[{entry}]",
            f"output_prefix=out{number}/t",
            "input_tokenizer_file=tok0/tokenizer.model",
        )
        second = _run(root, tmp_path, hub.url, "tokenize", *settings)
        assert second.returncode == 0 and "1,500 documents in, 0 skipped" in second.stdout, second.stderr
        outputs = [
            tmp_path / f"tok{number}" / "tokenizer.model",
            *sorted((tmp_path / f"out{number}").glob("*.[bi][id][nx]")),
        ]
        made.append([path.read_bytes() for path in outputs])
        again = _run(root, tmp_path, hub.url, "tokenize", *settings)
        assert again.returncode == 0 and "done already" in again.stdout
    assert made[0] == made[1] == made[2] and len(made[0]) == 5
    (record,) = [
        record
        for record in manifest.read(tmp_path / "out2" / "t_text_document.manifest.json").inputs["input_jsonl"]
        if record.path.endswith("a.jsonl")
    ]
    assert (
        record.path.startswith(f"hf://datasets/{NAME}@")
        and record.sha256 == hub_server.hashlib.sha256(FILES["a.jsonl"]).hexdigest()
    )


def test_a_change_of_the_dataset_is_noticed(root: Path, tmp_path: Path, hub: Any) -> None:
    (tmp_path / "sentence_piece_config.yaml").write_text("vocab_size: 400\ntxt_document: line\n", encoding="utf-8")
    settings = (f"input=[hf://datasets/{NAME}]", "output_dir=tok")
    assert _run(root, tmp_path, hub.url, "train_tokenizer", *settings).returncode == 0
    hub.datasets[NAME].files["a.jsonl"] += b'{"text": "one more"}\n'
    changed = _run(root, tmp_path, hub.url, "train_tokenizer", *settings)
    assert changed.returncode == 2 and "input = 5 files" in changed.stderr
