"""`benchmarks/gpu.sh`, tried on a CPU with a tiny model: every line of it runs, and no result is left behind."""

from __future__ import annotations

import subprocess
from pathlib import Path


def test_a_tiny_model_gives_the_table(root: Path, tmp_path: Path) -> None:
    command = ["bash", "benchmarks/gpu.sh", "125m", "--tiny", "--results", str(tmp_path), "--set", "seed=3"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("| 125m |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[-2:] == ["yes", "nothing"]  # flash attention; built by DeepSpeed
    assert float(cells[4].replace(",", "")) > 0
    assert not (root / "benchmarks" / "results" / "none").exists()


def test_an_unknown_part_is_refused(root: Path) -> None:
    done = subprocess.run(["bash", "benchmarks/gpu.sh", "7b"], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no part 7b" in done.stderr


def test_missing_packages_are_named(root: Path, tmp_path: Path) -> None:
    """With a python that has nothing, and no wheels."""
    script = (root / "benchmarks" / "gpu.sh").read_text(encoding="utf-8").replace("python=python3\n", "", 1)
    bare = tmp_path / "bare"
    bare.write_text('#!/bin/sh\nexec python3 -I -S "$@"\n', encoding="utf-8")
    bare.chmod(0o755)
    (tmp_path / "benchmarks").mkdir()
    copy = tmp_path / "benchmarks" / "gpu.sh"
    copy.write_text(script.replace("set -euo pipefail\n", f"set -euo pipefail\npython={bare}\n", 1), encoding="utf-8")
    done = subprocess.run(["bash", str(copy), "tests"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "deepspeed" in done.stderr and "--wheels" in done.stderr
