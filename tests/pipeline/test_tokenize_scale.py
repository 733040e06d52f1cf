"""Step 2 at its limits, through the real script: killed at any moment, much text and many documents."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from zerokara.tokens.indexed import TokenPaths

ROOT = Path(__file__).resolve().parents[2]
KILLS = 5


def _command(config: Path, prefix: Path, *more: str) -> list[str]:
    return ["bash", str(ROOT / "2_tokenize.sh"), "--config", str(config), "--set", f"output_prefix={prefix}", *more]


def _tokenize(config: Path, prefix: Path, *more: str) -> tuple[str, int]:
    """What it said, and the peak memory in bytes of its largest process."""
    with open(prefix.parent.parent / f"{prefix.parent.name}.log", "w+", encoding="utf-8") as log:
        process = subprocess.Popen(_command(config, prefix, *more), stdout=log, stderr=subprocess.STDOUT)
        peak = 0
        # What getrusage tells begins with the size of the process that started it; this does not.
        while process.poll() is None:
            family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
            peak = max(peak, *(_peak_bytes(pid) for pid in family))
            time.sleep(0.01)
        log.seek(0)
        said = log.read()
    assert process.returncode == 0, said
    return said, peak


def _peak_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def _write(path: Path, num_bytes: int, seed: int = 0) -> Path:
    """Documents of some hundred to some thousand characters."""
    chance, size = random.Random(seed), 0
    words = ["".join(chance.choices("abcdefghijklmnop", k=chance.randint(2, 7))) for _ in range(300)]
    stock = [" ".join(chance.choices(words, k=chance.randint(20, 600))) for _ in range(300)]
    with open(path, "w", encoding="utf-8") as file:
        while size < num_bytes:
            size += file.write(json.dumps({"text": f"{size} {chance.choice(stock)}"}) + "\n")
    return path


@pytest.fixture(scope="module")
def config(tiny_data: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration for two workers; the corpus is set by each test."""
    path = tmp_path_factory.mktemp("scale") / "config.yaml"
    values = {"input_tokenizer_file": tiny_data["input_tokenizer_file"], "num_workers": 2}
    path.write_text("".join(f"{key}: {value}\n" for key, value in values.items()), encoding="utf-8")
    return path


def _hashes(prefix: Path) -> dict[str, str]:
    files = sorted(path for path in prefix.parent.iterdir() if path.suffix in (".bin", ".idx"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_killed_at_any_moment_and_run_again(config: Path, tmp_path: Path) -> None:
    corpus = _write(tmp_path / "corpus.jsonl", 6_000_000)
    given = ("--set", f"input_jsonl={corpus}")
    started = time.monotonic()
    _tokenize(config, tmp_path / "whole" / "tokens", *given)
    seconds, chance, went_on = time.monotonic() - started, random.Random(7), 0
    expected = _hashes(tmp_path / "whole" / "tokens")
    for number in range(KILLS):
        prefix = tmp_path / f"killed{number}" / "tokens"
        silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(_command(config, prefix, *given), start_new_session=True, **silent)
        shards = TokenPaths(str(prefix)).work_folder
        deadline = time.monotonic() + (chance.uniform(0.3, 1.0) * seconds if number else 60)
        # The first one when there is something to go on from, the others at any moment.
        while time.monotonic() < deadline and (number or not any(shards.glob("*-*.json"))):
            time.sleep(0.002)
        # Half of the times the parent alone, whose workers are then orphans; else everything at once.
        (os.killpg if number % 2 else os.kill)(process.pid, signal.SIGKILL)
        process.wait()
        assert not TokenPaths(str(prefix)).manifest.exists() or _hashes(prefix) == expected
        said, _ = _tokenize(config, prefix, *given)
        went_on += "resuming" in said
        assert _hashes(prefix) == expected
        assert not TokenPaths(str(prefix)).work_folder.exists()
    assert went_on, "no run was killed in the middle"
    print(f"{KILLS} runs killed, {went_on} of them with shards to go on from, all ended with the same files")


def test_the_memory_does_not_grow_with_the_corpus(config: Path, tmp_path: Path) -> None:
    small, large = _write(tmp_path / "small.jsonl", 5_000_000), _write(tmp_path / "large.jsonl", 40_000_000)
    corpora = [("--set", f"input_jsonl={corpus}") for corpus in (small, large)]
    peaks = [_tokenize(config, tmp_path / Path(each[1]).stem / "tokens", *each)[1] for each in corpora]
    assert peaks[1] < 1.1 * peaks[0], peaks
