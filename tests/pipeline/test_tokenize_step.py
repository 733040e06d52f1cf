"""`2_tokenize.sh` and `count_tokens.py` as a user runs them: real processes on real files."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import psutil
import pytest
import sentencepiece

from zerokara import manifest
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.tokens.indexed import check_belongs

CONFIG = """\
# The corpus.
input_jsonl: corpus.jsonl   # one file
input_tokenizer_file: tokenizer.model
output_prefix: out/tokens
num_workers: 2
seq_len: 32
train_tokens:   auto   # all there is
lr: 6e-4
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a corpus of 200 documents, a tokenizer and a configuration, as the working directory."""
    random = Random(5)
    words = "a line of words that tell about the sea and the wind 海 と 風".split()  # noqa: SIM905
    texts = ["\n".join(" ".join(random.choices(words, k=8)) for _ in range(5)) for _ in range(200)]
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts) + "{broken\n"
    (tmp_path / "corpus.jsonl").write_text(content, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(texts).split("\n")), model_prefix=str(tmp_path / "tokenizer"), vocab_size=350,
        byte_fallback=True, pad_id=3, user_defined_symbols=["\n"], normalization_rule_name="identity",
        add_dummy_prefix=False, hard_vocab_limit=False, num_threads=1, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60, check=False)


def _step(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _run("bash", root / "2_tokenize.sh", *arguments)


def _count(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _run(sys.executable, root / "count_tokens.py", *arguments)


def test_the_step_from_start_to_count(root: Path, place: Path) -> None:
    done = _step(root)
    assert done.returncode == 0, done.stderr
    assert "step 2 tokenise: 1 file, " in done.stdout and "out/tokens_text_document.bin" in done.stdout
    assert "201 documents in, 1 skipped" in done.stdout and "190 documents" in done.stdout
    assert "broken JSON 1; listed in out/tokens_quarantine.jsonl" in done.stdout
    steps = [line.split(maxsplit=2)[::2] for line in done.stdout.splitlines()[-2:]]
    assert [[word, Path(script).name] for word, script in steps] == [
        ["next:", "count_tokens.py"],
        ["then:", "3_train_node1.sh"],
    ]

    made = manifest.read(place / "out" / "tokens_text_document.manifest.json")
    facts = made.facts
    assert (facts["documents_in"], facts["documents_written"], facts["skipped"]) == (201, 200, {"broken JSON": 1})
    assert (facts["train"]["documents"], facts["valid"]["documents"], facts["dtype"]) == (190, 10, "uint16")
    digest = hashlib.sha256((place / "tokenizer.model").read_bytes()).hexdigest()
    assert facts["tokenizer_sha256"] == digest and check_belongs("out/tokens", digest)
    assert sorted(record.path for record in made.outputs["tokens"]) == sorted(
        path.name for path in (place / "out").iterdir() if "manifest" not in path.name
    )

    again = _step(root)
    assert again.returncode == 0 and "done already" in again.stdout
    assert _step(root, "--set", "max_bad_fraction=0.001").returncode == 2

    counted = _count(root)
    assert counted.returncode == 0, counted.stderr
    assert f"{facts['train']['tokens']:,} tokens" in counted.stdout
    assert f"{facts['valid']['tokens']:,} tokens" in counted.stdout
    one_pass = (facts["train"]["tokens"] - 1) // 32 * 32
    assert f"auto: {one_pass:,} tokens" in counted.stdout

    written = _count(root, "--write", "--set", "epochs=2")
    assert written.returncode == 0, written.stderr
    expected = CONFIG.replace("train_tokens:   auto   #", f"train_tokens: {2 * one_pass}   #")
    assert (place / "config.yaml").read_text(encoding="utf-8") == expected
    assert load(PretrainConfig, "config.yaml").train_tokens == 2 * one_pass
    assert "2.000 epochs" in _count(root).stdout

    limited = _count(root, "--set", "max_steps=3", "--set", "global_batch_size=8")
    assert limited.returncode == 0 and "max_steps" in limited.stdout
    assert f"{3 * 8 * 32:,} tokens, {3 * 8 * 32 / one_pass:.3f} epochs" in limited.stdout


def test_write_adds_the_key_where_it_is_missing(root: Path, place: Path) -> None:
    assert _step(root).returncode == 0
    short = "".join(line for line in CONFIG.splitlines(keepends=True) if "train_tokens" not in line).rstrip("\n")
    (place / "config.yaml").write_text(short, encoding="utf-8")
    assert _count(root, "--write", "--dry-run").returncode == 0
    assert (place / "config.yaml").read_text(encoding="utf-8") == short
    assert _count(root, "--write").returncode == 0
    found = (place / "config.yaml").read_text(encoding="utf-8")
    assert found.startswith(short + "\ntrain_tokens: ") and found.count("\n") == short.count("\n") + 2


def test_other_work_at_the_same_place_is_refused_until_redone(root: Path, place: Path) -> None:
    assert _step(root).returncode == 0
    before = (place / "out" / "tokens_text_document.bin").read_bytes()
    other = _step(root, "--set", "split_seed=9")
    assert other.returncode == 2 and "split_seed = 9: was 1234" in other.stderr and "--redo" in other.stderr
    with open(place / "corpus.jsonl", "a", encoding="utf-8") as file:
        file.write('{"text": "one more"}\n')
    changed = _step(root)
    assert changed.returncode == 2 and "input_jsonl = " in changed.stderr and "changed" in changed.stderr
    assert (place / "out" / "tokens_text_document.bin").read_bytes() == before
    assert _step(root, "--redo").returncode == 0
    assert (place / "out" / "tokens_text_document.bin").read_bytes() != before


def test_a_moved_corpus_is_the_same_corpus(root: Path, place: Path) -> None:
    assert _step(root).returncode == 0
    (place / "elsewhere").mkdir()
    (place / "corpus.jsonl").rename(place / "elsewhere" / "c.jsonl")
    moved = _step(root, "--set", "input_jsonl=elsewhere/c.jsonl")
    assert moved.returncode == 0 and "done already" in moved.stdout


def test_dry_run_writes_nothing(root: Path, place: Path) -> None:
    dry = _step(root, "--dry-run")
    assert dry.returncode == 0 and "nothing was written" in dry.stdout and "about" in dry.stdout
    assert not (place / "out").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("input_jsonl=korpus.jsonl", "korpus.jsonl: names no file of a format"),
        ("input_tokenizer_file=none.model", "none.model: there is no such tokenizer file"),
        ("text_field=body", "corpus.jsonl:1: has no field 'body'"),
        ("valid_min_documents=150", "valid_min_documents = 150: the source corpus.jsonl has 200 documents, too few"),
        ("max_bad_fraction=0.001", "max_bad_fraction = 0.001: 1 of 201 documents are bad"),
        ("outptu_prefix=x", "did you mean output_prefix?"),
    ],
)
def test_user_faults_exit_with_2_and_leave_no_bin(root: Path, place: Path, setting: str, message: str) -> None:
    failed = _step(root, "--set", setting)
    assert failed.returncode == 2 and message in failed.stderr, failed.stderr
    assert not list(place.glob("out/*.bin")) and not list(place.glob("out/**/*.bin.*.partial"))


def test_what_was_encoded_is_kept_when_only_a_limit_was_too_strict(root: Path, place: Path) -> None:
    assert _step(root, "--set", "max_bad_fraction=0.001").returncode == 2
    again = _step(root)
    assert again.returncode == 0 and " 1 shards of" in again.stdout
    assert not (place / "out" / "tokens_tokenizing.partial").exists()


def test_count_without_token_files(root: Path, place: Path) -> None:
    failed = _count(root)
    assert failed.returncode == 2
    assert "tokens_text_document.idx" in failed.stderr and "step 2" in failed.stderr


def test_count_of_a_text_shorter_than_a_sequence(root: Path, place: Path) -> None:
    assert _step(root).returncode == 0
    failed = _count(root, "--set", "seq_len=1000000")
    assert (
        failed.returncode == 2 and "seq_len" in failed.stderr and "longer than the whole training text" in failed.stderr
    )


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_step_that_is_stopped_leaves_no_half_file(root: Path, place: Path, how: signal.Signals) -> None:
    content = (place / "corpus.jsonl").read_bytes()
    with open(place / "corpus.jsonl", "wb") as file:
        for _ in range(400):
            file.write(content)
    step = subprocess.Popen(
        ["bash", root / "2_tokenize.sh", "--set", "max_bad_fraction=1"], stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    work_folder = place / "out" / "tokens_tokenizing.partial"
    while not list(work_folder.glob("*-*.json")):
        assert step.poll() is None, "it ended before it could be stopped"
        time.sleep(0.01)
    os.killpg(step.pid, how) if how is signal.SIGINT else step.send_signal(how)
    _, errors = step.communicate(timeout=20)
    assert not list((place / "out").glob("tokens_*text*"))
    if how is signal.SIGINT:
        assert step.returncode == 130 and "Traceback" not in errors
        assert work_folder.exists() and not list(work_folder.glob("*.partial")), "finished shards only"
    (place / "corpus.jsonl").write_bytes(content)
    after = _step(root)
    assert after.returncode == 0, after.stderr
    assert (place / "out" / "tokens_text_document.bin").exists() and not work_folder.exists()


def test_a_killed_worker_ends_the_step(root: Path, place: Path) -> None:
    content = (place / "corpus.jsonl").read_bytes()
    with open(place / "corpus.jsonl", "wb") as file:
        for _ in range(400):
            file.write(content)
    step = subprocess.Popen(["bash", root / "2_tokenize.sh"], stderr=subprocess.PIPE, text=True)
    work_folder = place / "out" / "tokens_tokenizing.partial"
    while not list(work_folder.glob("*-*.json")):
        assert step.poll() is None, "it ended before it could be stopped"
        time.sleep(0.01)
    workers = [child for child in psutil.Process(step.pid).children(recursive=True) if child.ppid() != step.pid]
    assert len(workers) == 2
    workers[0].kill()
    _, errors = step.communicate(timeout=20)
    assert step.returncode == 1 and "SIGKILL" in errors and "corpus.jsonl" in errors and "num_workers=1" in errors
    assert [path.name for path in (place / "out").iterdir()] == [work_folder.name]
    assert not list(work_folder.glob("*.partial")), "finished shards only"


@pytest.mark.parametrize("module", ["zerokara.steps.tokenize", "zerokara.steps.count_tokens"])
def test_starting_does_not_wait_for_torch(root: Path, module: str) -> None:
    code = (
        f"import sys, {module}; print([name for name in ('torch', 'megatron', 'transformers') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(root / "original_codes")}
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert started.stdout.strip() == "[]"
