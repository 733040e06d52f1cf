"""`2_tokenize.sh` and `count_tokens.py` as a user runs them: real processes on real files, ended at any moment."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from random import Random

import psutil
import pytest
import warm

from zerokara.base import manifest
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.tokens.indexed import check_belongs

pytestmark = pytest.mark.usefixtures("warm_python")
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
def place(tiny_data: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a corpus of 200 documents, a tokenizer and a configuration, as the working directory."""
    random = Random(5)
    words = "a line of words that tell about the sea and the wind 海 と 風".split()  # noqa: SIM905
    texts = ["\n".join(" ".join(random.choices(words, k=8)) for _ in range(5)) for _ in range(200)]
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts) + "{broken\n"
    (tmp_path / "corpus.jsonl").write_text(content, encoding="utf-8")
    shutil.copy(tiny_data["input_tokenizer_file"], tmp_path / "tokenizer.model")
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60, check=False)


def _step(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _run("bash", root / "2_tokenize.sh", *arguments)


def _count(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _run(warm.python(), root / "count_tokens.py", *arguments)


def test_the_step_from_start_to_count(root: Path, place: Path) -> None:
    uncounted = _count(root)
    assert uncounted.returncode == 2 and "tokens_text_document.idx" in uncounted.stderr
    dry = _step(root, "--dry-run")
    assert dry.returncode == 0 and "nothing was written" in dry.stdout and not (place / "out").exists()
    failed = _step(root, "--set", "max_bad_fraction=0.001")
    assert failed.returncode == 2, failed.stderr
    assert "max_bad_fraction = 0.001: 1 of 201 documents are bad" in failed.stderr
    assert not list(place.glob("out/*.bin")) and not list(place.glob("out/**/*.bin.*.partial"))
    done = _step(root)
    assert done.returncode == 0 and " 1 shard of" in done.stdout, done.stderr
    assert not (place / "out" / "tokens_tokenizing.partial").exists()
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

    (place / "elsewhere").mkdir()
    (place / "corpus.jsonl").rename(place / "elsewhere" / "c.jsonl")
    moved = ("--set", "input_jsonl=elsewhere/c.jsonl")
    record = next((place / "out").glob("*manifest.json"))
    written = json.loads(record.read_bytes())
    written["facts"] |= {"damaged_files": 1, "damaged": [{"name": "a.gz", "bytes_lost": 5}]}  # as 1.0.0 wrote it
    record.write_text(json.dumps(written), encoding="utf-8")
    assert "done already" in _step(root, *moved).stdout
    assert _step(root, *moved, "--set", "max_bad_fraction=0.001").returncode == 2

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
    assert "one sequence takes seq_len + 1" in _count(root, "--set", "seq_len=1000000").stderr

    short = "".join(line for line in CONFIG.splitlines(keepends=True) if "train_tokens" not in line).rstrip("\n")
    (place / "config.yaml").write_text(short, encoding="utf-8")
    assert _count(root, "--write").returncode == 0
    found = (place / "config.yaml").read_text(encoding="utf-8")
    assert found.startswith(short + "\ntrain_tokens: ") and found.count("\n") == short.count("\n") + 2


def _token_files(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.iterdir() if path.suffix in (".bin", ".idx"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


ENDINGS = [
    (os.killpg, signal.SIGINT, 0.0),
    (os.kill, signal.SIGKILL, 0.0),  # the parent alone, whose workers are then orphans
    (os.killpg, signal.SIGKILL, 0.6),
    (os.kill, signal.SIGKILL, 0.9),
]


@pytest.mark.slow
def test_a_step_ended_at_any_moment_goes_on_the_same(root: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its first finished shard, or after a share of the time that it takes."""
    monkeypatch.delenv("BASH_ENV", raising=False)  # signals reach all processes of a step's own
    (place / "corpus.jsonl").write_bytes((place / "corpus.jsonl").read_bytes() * 80)
    started = time.monotonic()
    assert _step(root).returncode == 0
    seconds, expected = time.monotonic() - started, _token_files(place / "out")
    for number, (send, with_signal, share) in enumerate(ENDINGS):
        out = place / f"out{number}"
        work_folder, settings = out / "tokens_tokenizing.partial", ("--set", f"output_prefix={out}/tokens")
        step = subprocess.Popen(
            ["bash", root / "2_tokenize.sh", *settings], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + (share * seconds or 60)
        while time.monotonic() < deadline and (share or not any(work_folder.glob("*-*.json"))):
            time.sleep(0.002)
        send(step.pid, with_signal)
        _, errors = step.communicate(timeout=20)
        if with_signal == signal.SIGINT:
            assert step.returncode == 130 and "Traceback" not in errors
            assert not list(out.glob("tokens_*text*")) and not list(work_folder.glob("*.partial"))
        assert not (out / "tokens_text_document.manifest.json").exists() or _token_files(out) == expected
        after = _step(root, *settings)
        assert after.returncode == 0 and (share or "resuming" in after.stdout), after.stderr
        assert _token_files(out) == expected and not work_folder.exists()


def _peak_bytes(pid: int) -> int:
    """Peak memory of a process; `getrusage` begins with the size of the process that started it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


@pytest.mark.slow
def test_the_memory_does_not_grow_with_the_corpus(root: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BASH_ENV", raising=False)
    content, peaks = (place / "corpus.jsonl").read_bytes(), [0, 0]
    for number, times in enumerate((80, 640)):
        (place / "corpus.jsonl").write_bytes(content * times)
        step = subprocess.Popen(["bash", root / "2_tokenize.sh", "--redo"], stdout=subprocess.DEVNULL)
        while step.poll() is None:
            family = [step.pid, *(child.pid for child in psutil.Process(step.pid).children(recursive=True))]
            peaks[number] = max(peaks[number], *map(_peak_bytes, family))
            time.sleep(0.01)
        assert step.returncode == 0
    assert peaks[1] < 1.1 * peaks[0], peaks
