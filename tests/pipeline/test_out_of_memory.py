"""A lack of memory is answered in numbers, with exit code 1, and costs no checkpoint."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
ADDRESS_SPACE = 3_400_000_000
"""Of each process: enough to load torch and to train with small micro batches, not for 262,144 tokens at a time."""


def step_3(*settings: str, limit: int | None = None) -> subprocess.Popen[str]:
    config, *changes = settings
    command = [sys.executable, "-m", "zerokara.steps", "train", "--config", config]
    for change in changes:
        command += ["--set", change]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "original_codes")},
        preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))) if limit else None,
    )


def test_too_large_a_micro_batch_is_answered_with_what_fits(tiny_data: dict[str, str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = (
        tiny_data["config"],
        f"output_model_dir={run_dir}",
        "global_batch_size=8192",
        "micro_batch_size=8192",
        f"train_tokens={8192 * 32}",
        "max_epochs_per_source=100",
    )
    process = step_3(*settings, limit=ADDRESS_SPACE)
    printed, _ = process.communicate(timeout=200)
    assert process.returncode == 1, printed
    assert "Traceback" not in printed
    assert re.search(r"note .* micro_batch_size: \d+", printed)
    found = re.search(r"out of memory .*micro_batch_size 8192\. (.*)", printed)
    assert found and re.search(r"optimizer state [\d.]+ kB", found[1])
    assert re.search(r"micro_batch_size: \d+ \(at most [\d.]+ [kMG]B", found[1])
    assert not re.search(r"\blr\b|global_batch_size|seq_len", found[1])
    assert not list(run_dir.glob("global_step*"))


def test_a_killed_training_process_is_told_as_such(tiny_data: dict[str, str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    endless = ("train_tokens=100000000", "max_epochs_per_source=10000", "save_interval=5", "keep_last=1")
    process = step_3(tiny_data["config"], f"output_model_dir={run_dir}", *endless)
    deadline = time.monotonic() + 120
    while not (run_dir / "latest").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    [trainer] = psutil.Process(process.pid).children(recursive=True)
    trainer.send_signal(signal.SIGKILL)
    words, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "SIGKILL" in words
    assert f"{run_dir}: python -m zerokara.steps train " in words
    newest = run_dir / (run_dir / "latest").read_text(encoding="utf-8").strip()
    assert (newest / "manifest.json").exists()
