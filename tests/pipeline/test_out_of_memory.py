"""A lack of memory is answered in numbers, with exit code 1, and costs no checkpoint."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from configs import typed

ROOT = Path(__file__).resolve().parents[2]
ADDRESS_SPACE = 3_400_000_000
"""Limit of each process: enough to load torch and to train with small micro batches, not for 262,144 tokens at once."""


@pytest.mark.slow
def test_too_large_a_micro_batch_is_answered_with_what_fits(tiny_data: dict[str, str], tmp_path: Path) -> None:
    run_dir, size = tmp_path / "run", 8192
    settings = (
        f"output_model_dir={run_dir}", f"global_batch_size={size}", f"micro_batch_size={size}",
        f"train_tokens={size * 32}", "max_epochs_per_source=100",
    )  # fmt: skip
    command = [sys.executable, "-m", "zerokara.steps", "train", "--config", tiny_data["config"]]
    process = subprocess.Popen(
        [*command, *typed(*settings)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "original_codes")},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE)),
    )  # fmt: skip
    printed, _ = process.communicate(timeout=200)
    assert process.returncode == 1 and "Traceback" not in printed, printed
    assert re.search(r"note .* micro_batch_size: \d+", printed)
    found = re.search(r"out of memory .*micro_batch_size 8192\. (.*)", printed)
    assert found and re.search(r"optimizer state [\d.]+ kB", found[1])
    assert re.search(r"micro_batch_size: \d+ \(at most [\d.]+ [kMG]B", found[1])
    assert not re.search(r"\blr\b|global_batch_size|seq_len", found[1])
    assert not list(run_dir.glob("global_step*"))
