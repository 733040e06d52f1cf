"""Converting and proving a model never holds much more than one copy of the exported weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_COPIES = 1.2
"""Resident, with the pages of mapped files. Loading the trained weights in fp32 would be two copies of bf16."""


def test_an_export_needs_little_more_than_one_copy_of_the_weights(tmp_path: Path) -> None:
    program = Path(__file__).with_name("measure_export_memory.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "original_codes"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    copies = float(done.stdout.split()[-1])
    assert 0 < copies <= MOST_COPIES, f"{copies:.2f} copies"
