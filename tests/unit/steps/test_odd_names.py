"""Steps 1 and 2 over files whose names are no UTF-8, or would steer a terminal."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
from configs import typed

from zerokara import manifest
from zerokara.errors import guarded
from zerokara.steps import tokenize, train_tokenizer

RAW = os.fsdecode(b"d\xe9\x1b[31m")
SPELT = r"d\xe9\u001b[31m"


@pytest.fixture
def place(tmp_path: Path, tiny_data: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with such a name, and with a corpus in such a folder and file: good documents and a bad one."""
    folder = tmp_path / RAW
    (folder / "corpus" / RAW).mkdir(parents=True)
    text = Path(tiny_data["input_jsonl"]).read_text(encoding="utf-8")
    (folder / "corpus" / RAW / f"{RAW}.jsonl").write_text(f"{{broken\n{text}", encoding="utf-8")
    monkeypatch.chdir(folder)
    return folder


def test_both_steps_take_any_name(
    place: Path, tiny_data: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = ["--config", "/dev/null", *typed("input=corpus", "output_dir=made", "vocab_size=450")]
    second = ["--config", tiny_data["config"], *typed("input_jsonl=corpus", "output_prefix=made/tokens")]
    file_name = f"corpus/{SPELT}/{SPELT}.jsonl"
    for main, given, record in (
        (train_tokenizer.main, first, "manifest.json"),
        (tokenize.main, second, "tokens_text_document.manifest.json"),
    ):
        assert main(given) == 0, capfd.readouterr().err
        done = manifest.read(Path("made") / record)
        (corpus,) = done.inputs.get("input", done.inputs.get("input_jsonl", []))
        assert corpus.path == f"{tmp_path}/{SPELT}/{file_name}"
        assert main(given) == 0 and "already" in capfd.readouterr().out
    (bad,) = Path("made/tokens_quarantine.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(bad)["file"] == file_name

    assert main([*second, "--redo", "--set", "text_field=body"]) == 2
    printed = capfd.readouterr().err
    assert f"{file_name}:2: has no field 'body'" in printed and "\x1b" not in printed


def test_hashes_are_found_by_any_name(place: Path) -> None:
    path = place / "corpus" / RAW / f"{RAW}.jsonl"
    assert list(manifest.hash_files([path]).values()) == [manifest.sha256_of(path)]


def test_paths_of_the_configuration_are_plain_text(
    place: Path, tiny_data: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    before = sorted(place.rglob("*"))
    given = ["--config", tiny_data["config"], "--set"]
    assert tokenize.main([*given, f"output_prefix={RAW}"]) == 2
    assert tokenize.main([*given, 'output_prefix="a\\e[31m"']) == 2
    assert tokenize.main([*given, 'output_prefix="a\\0"']) == 2
    assert tokenize.main([*given, f"input_jsonl={RAW}/a.jsonl"]) == 2
    printed = capfd.readouterr().err
    assert rf"output_prefix = {SPELT}: " in printed and rf"input_jsonl = {SPELT}/a.jsonl: " in printed
    assert r"output_prefix = a\u001b[31m: " in printed and "\x1b" not in printed
    assert sorted(place.rglob("*")) == before


def test_what_a_terminal_cannot_show_is_spelt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding in ("ascii", "utf-8"):
        printed = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding=encoding))
        assert guarded(lambda: print("→", RAW)) == 0
        sys.stdout.flush()
        assert printed.getvalue() == "→ ".encode(encoding, "backslashreplace") + b"d\\udce9\x1b[31m\n"
