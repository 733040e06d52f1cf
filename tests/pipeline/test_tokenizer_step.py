"""Step 1 as a user runs it: the script, its files, its words, its exit codes."""

import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from configs import typed
from corpus_files import write_texts
from foreign_models import QWEN_3, byte_level
from toy_tokenizers import toy_lines

from zerokara.base import file_lock, manifest
from zerokara.base.progress import bytes_text
from zerokara.steps import train_tokenizer
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.hugging_face import open_encoder

CONFIG = """\
input: corpus.jsonl
output_dir: tokenizer
vocab_size: 500
character_coverage: 1.0
num_threads: 1
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    lines = toy_lines(600)
    write_texts(tmp_path / "corpus.jsonl", [*("\n".join(lines[i : i + 4]) for i in range(0, 600, 4)), ""])
    (tmp_path / "sentence_piece_config.yaml").write_text(CONFIG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_step_from_text_to_tokenizer(root: Path, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = place / "tokenizer"
    assert train_tokenizer.main(["--dry-run"]) == 0
    shown = capfd.readouterr().out
    assert "dry run: nothing was written" in shown and "of memory" in shown and not folder.exists()

    command = [sys.executable, str(root / "1_train_sentencepiece_tokenizer.py")]
    done = subprocess.run(command, cwd=place, capture_output=True, encoding="utf-8", timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    following = shlex.split(done.stdout.splitlines()[-1])
    assert following[:3] == ["next:", "bash", str(root / "2_tokenize.sh")]
    settings = {"input_jsonl=[corpus.jsonl]", "input_tokenizer_file=tokenizer/tokenizer.model"}
    assert settings <= set(following)
    assert "characters/token" in done.stdout and "1 line skipped: empty text" in done.stdout
    assert "trainer_interface" not in done.stdout + done.stderr
    reports = {"report.json", "report.html"}
    wanted = {"tokenizer.model", "tokenizer.vocab", *reports, "manifest.json", "training.log"}
    assert {path.name for path in folder.iterdir()} == wanted
    encoder = Encoder(folder / "tokenizer.model")
    vocabulary = (folder / "tokenizer.vocab").read_text(encoding="utf-8").splitlines()
    assert len(vocabulary) == encoder.vocab_size == 500
    assert [line.split("\t")[0] for line in vocabulary[:5]] == ["<unk>", "<s>", "</s>", "<pad>", "\\n"]
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    record = manifest.read(folder / "manifest.json")
    sample = record.facts["sample"]
    assert sample["bytes_used"] == sample["bytes_chosen"] > 0
    assert report["sources"][0]["tokenizers"]["this one"]["round_trip_failures"] == 0
    assert record.step == "train_tokenizer" and record.facts["vocab_size"] == 500
    estimated, peak = (record.facts[f"{name}_memory_bytes"] for name in ("estimated", "peak"))
    assert f"{bytes_text(peak)} at the peak, {bytes_text(estimated)} expected at most" in done.stdout
    # So small a sample needs little more than the process itself, of which another Python may take some megabytes more.
    assert peak < estimated < 2 * peak
    assert record.outputs["tokenizer"][0].sha256 == encoder.sha256

    assert train_tokenizer.main([]) == 0 and "done already" in capfd.readouterr().out
    assert train_tokenizer.main(typed(vocab_size=480)) == 2
    shown = capfd.readouterr().err
    assert "vocab_size = 480: was 500" in shown and "--redo" in shown
    assert (folder / "tokenizer.model").read_bytes() == encoder.model_bytes
    assert train_tokenizer.main(["--redo"]) == 0
    assert (folder / "tokenizer.model").read_bytes() == encoder.model_bytes


def test_a_second_step_at_the_same_time_is_refused_and_a_full_disk_is_told(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = place / "tokenizer"
    assert train_tokenizer.main([]) == 0
    with file_lock.held(folder / "tokenizer.lock"):
        made = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert train_tokenizer.main(["--redo"]) == 2
        assert f"{folder.name}: process {os.getpid()} is writing here; wait until it ends" in capfd.readouterr().err
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == made
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        assert train_tokenizer.main(["--redo"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capfd.readouterr().err
    assert said.startswith("failed: cannot read or write") and said.count("\n") == 1 and "make room" in said
    assert (folder / "tokenizer.model").read_bytes() == made["tokenizer.model"]


def test_a_tokenizer_like_another_one_and_back(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base, folder = (
        byte_level(place / "base", QWEN_3, tokenizer_config={"eos_token": "<|endoftext|>"}),
        place / "tokenizer",
    )
    for settings, size in (({"vocab_size": 400}, 400), ({"extend": 60}, open_encoder(base.parent).vocab_size + 60)):
        assert train_tokenizer.main([*typed(base_tokenizer=base.parent, **settings), "--redo"]) == 0
        shown = capfd.readouterr().out
        assert f"byte-level BPE, {settings.get('extend', 400)} pieces" in shown and "0 of " in shown
        assert "input_tokenizer_file=tokenizer/tokenizer.json" in shown and open_encoder(folder).vocab_size == size
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        assert report["vocab_size"] == size and any("▁" in piece for piece, _ in report["longest"])
    assert train_tokenizer.main(typed(base_tokenizer=base.parent, extend=60)) == 0
    assert "done already" in capfd.readouterr().out
    assert train_tokenizer.main(["--redo"]) == 0 and not (folder / "tokenizer.json").exists()
    assert open_encoder(folder).library == "sentencepiece"


def test_pieces_lie_within_morphemes_and_it_needs_no_analyser(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = ["昨日は東京へ行きました。今日も東京で会いましょう。", "学校には 先生と学生が います。"] * 200
    write_texts(place / "corpus.jsonl", lines)
    assert train_tokenizer.main(typed(pre_segment="sudachi", vocab_size=334)) == 0, capfd.readouterr().err
    shown = capfd.readouterr().out
    assert "SudachiPy" in shown and " 0 of " in shown
    record = manifest.read(place / "tokenizer" / "manifest.json")
    assert record.settings["pre_segment"] == "sudachi" and record.facts["analyser"].keys() >= {"SudachiPy"}
    encoder = Encoder(place / "tokenizer" / "tokenizer.model")
    assert encoder.decode(encoder.encode(lines[1])) == lines[1]
    assert not list((place / "tokenizer").glob("work*"))
