"""Step 1 as a user runs it: the script, its files, its words, its exit codes."""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zerokara import manifest
from zerokara.progress import bytes_text
from zerokara.tokenizer.encoder import Encoder

CONFIG = """\
input: corpus.jsonl
output_dir: tokenizer
vocab_size: 500
character_coverage: 1.0
num_threads: 1
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working folder with a corpus and a configuration."""
    rng = random.Random(3)
    alphabets = ("etaoinshrdlucm", "のはがをにとでた今日天気公園友達本", "오늘날씨가좋아서공원에", "țșăâîmunți")
    words = ["".join(rng.choices(rng.choice(alphabets), k=rng.randint(2, 5))) for _ in range(400)]
    texts = ["\n".join(" ".join(rng.choices(words, k=9)) for _ in range(4)) for _ in range(150)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "corpus.jsonl").write_text(lines + '{"text": ""}\n', encoding="utf-8")
    (tmp_path / "sentence_piece_config.yaml").write_text(CONFIG, encoding="utf-8")
    return tmp_path


def _step(root: Path, place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "1_train_sentencepiece_tokenizer.py"), *arguments]
    return subprocess.run(command, cwd=place, capture_output=True, encoding="utf-8", timeout=120, check=False)


def test_the_step_from_text_to_tokenizer(root: Path, place: Path) -> None:
    dry = _step(root, place, "--dry-run")
    assert dry.returncode == 0 and "dry run: nothing was written" in dry.stdout and not (place / "tokenizer").exists()
    assert "of memory" in dry.stdout

    done = _step(root, place)
    assert done.returncode == 0, done.stderr
    following = shlex.split(done.stdout.splitlines()[-1])
    assert following[:3] == ["next:", "bash", str(root / "2_tokenize.sh")]
    assert following[-2:] == ["--set", "input_tokenizer_file=tokenizer/tokenizer.model"]
    assert "characters/token" in done.stdout and "1 line skipped: empty text" in done.stdout
    assert "trainer_interface" not in done.stdout + done.stderr
    names = {path.name for path in (place / "tokenizer").iterdir()}
    reports = {"report.json", "report.txt", "report.html"}
    wanted = {"tokenizer.model", "tokenizer.vocab", *reports, "manifest.json", "training.log"}
    assert names == wanted
    encoder = Encoder(place / "tokenizer" / "tokenizer.model")
    vocabulary = (place / "tokenizer" / "tokenizer.vocab").read_text(encoding="utf-8").splitlines()
    assert len(vocabulary) == encoder.vocab_size == 500
    assert [line.split("\t")[0] for line in vocabulary[:5]] == ["<unk>", "<s>", "</s>", "<pad>", "\\n"]
    report = json.loads((place / "tokenizer" / "report.json").read_text(encoding="utf-8"))
    assert report["sample"]["bytes_used"] == report["sample"]["bytes_chosen"] > 0
    assert report["sources"][0]["tokenizers"]["this one"]["round_trip_failures"] == 0
    record = manifest.read(place / "tokenizer" / "manifest.json")
    assert record.step == "train_tokenizer" and record.facts["vocab_size"] == 500
    estimated, peak = record.facts["estimated_memory_bytes"], record.facts["peak_memory_bytes"]
    assert f"{bytes_text(peak)} at the peak, estimated {bytes_text(estimated)}" in done.stdout
    # So small a sample needs little more than the process itself, of which another Python may take some megabytes more.
    assert estimated == pytest.approx(peak, rel=0.25, abs=10_000_000)
    assert report["sample"]["estimated_memory_bytes"] == estimated and report["sample"]["peak_memory_bytes"] == peak
    assert record.outputs["tokenizer"][0].sha256 == encoder.sha256

    first = (place / "tokenizer" / "tokenizer.model").read_bytes()
    again = _step(root, place)
    assert again.returncode == 0 and "done already" in again.stdout
    other = _step(root, place, "--set", "vocab_size=480")
    assert other.returncode == 2 and "vocab_size = 480: was 500" in other.stderr and "--redo" in other.stderr
    assert (place / "tokenizer" / "tokenizer.model").read_bytes() == first
    redone = _step(root, place, "--redo")
    assert redone.returncode == 0 and (place / "tokenizer" / "tokenizer.model").read_bytes() == first


def test_pieces_lie_within_morphemes_and_the_tokenizer_needs_no_analyser(root: Path, place: Path) -> None:
    lines = ["昨日は東京へ行きました。今日も東京で会いましょう。", "学校には 先生と学生が います。"] * 200
    (place / "corpus.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), "utf-8")
    done = _step(root, place, "--set", "pre_segment=sudachi", "--set", "vocab_size=334")
    assert done.returncode == 0, done.stderr
    assert "SudachiPy" in done.stdout and " 0 of " in done.stdout
    record = manifest.read(place / "tokenizer" / "manifest.json")
    assert record.settings["pre_segment"] == "sudachi" and record.facts["analyser"].keys() >= {"SudachiPy"}
    encoder = Encoder(place / "tokenizer" / "tokenizer.model")
    assert encoder.decode(encoder.encode(lines[1])) == lines[1]
    assert not list((place / "tokenizer").glob("work*"))


def test_faults_are_told_with_exit_2_and_leave_nothing(root: Path, place: Path) -> None:
    large = _step(root, place, "--set", "vocab_size=200000")
    assert large.returncode == 2 and "vocab_size = 200000" in large.stderr
    assert not (place / "tokenizer").exists()

    missing = _step(root, place, "--set", "input=nowhere.jsonl")
    assert missing.returncode == 2 and "nowhere.jsonl" in missing.stderr and ":1: " not in missing.stderr
    field = _step(root, place, "--set", "text_field=content")
    assert field.returncode == 2 and "'content'" in field.stderr and ": text" in field.stderr
    both = _step(root, place, "--set", "add_dummy_prefix=true", "--set", "user_defined_symbols=[<x>]")
    assert both.returncode == 2 and "user_defined_symbols" in both.stderr
    compare = _step(root, place, "--set", "compare_with=corpus.jsonl")
    assert compare.returncode == 2 and "is not a SentencePiece model" in compare.stderr


def test_the_step_answers_in_under_a_second_and_imports_nothing_heavy(root: Path, place: Path) -> None:
    started = time.monotonic()
    wrong = _step(root, place, "--set", "vocab_sise=1")
    assert wrong.returncode == 2 and "vocab_size" in wrong.stderr
    assert time.monotonic() - started < 5, "a second on an idle machine"
    code = (
        "import sys; from zerokara.steps import train_tokenizer;"
        "from zerokara.tokenizer import fast_encoder, sample_budget, training;"
        "print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(root / "original_codes")},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert shown.stdout.strip() == "[]"
