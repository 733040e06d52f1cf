"""`benchmarks/gpu.sh` and tests/gpu, tried on a CPU with tiny models: nothing is found out there, and no line fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


def test_step_3_is_measured_and_profiled(root: Path, tmp_path: Path) -> None:
    results = tmp_path / "gpu"
    results.mkdir()
    earlier = {"name": "125m-seed=3", "part": "dense", "left_out": "-5 s were left"}
    (results / "measurements.jsonl").write_text(json.dumps(earlier) + "\n", encoding="utf-8")
    options = ["--tiny", "--results", str(results), "--only", "125m", "--set", "seed=3"]
    command = ["bash", "benchmarks/gpu.sh", "dense", *options]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not in the list" not in done.stdout, "gpu_needs.py does not name all that is imported"
    before, found = map(json.loads, (results / "measurements.jsonl").read_text(encoding="utf-8").splitlines())
    assert before == earlier and found["name"] == "125m-seed=3-2"
    assert found["updater"] == "zerokara's own, not DeepSpeed's ZeRO" and found["steps"] == 3
    assert found["tokens_per_second"] > 0 and found["save"] and found["compile_seconds"] is None
    assert found["second_start_seconds"] > 0 and 1 < found["start_seconds"] + found["second_start_seconds"] < 300
    assert 2e8 < found["memory_bytes"] <= found["host_bytes"] and 0 < found["least_bytes"] <= found["ample_bytes"]
    shown = found["profile"]
    assert 0 <= shown["idle"] < 1 and sum(took for _, took in shown["kernels"]) > 0
    assert any("blocked_attention" in name for name in shown["attention"])
    table = (results / "table.md").read_text(encoding="utf-8")
    assert table in done.stdout and "| 125m-seed=3-2 |" in table and "left out, -5 s" in table
    assert {path.name for path in results.iterdir()} == {"measurements.jsonl", "log.txt", "table.md"}


def test_the_tests_on_a_gpu_are_rehearsed(root: Path, tmp_path: Path) -> None:
    """`--tiny` leaves out those marked slow, some of which compile for a minute; here some of each file are tried."""
    chosen = "guessing or flash or known or goes_out or (once_a_step and (t5_moe or adamw))"
    options = ["--tiny", "--results", str(tmp_path), "--only", chosen]
    command = [sys.executable, "-P", "benchmarks/gpu.py", "tests", *options]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = map(json.loads, (tmp_path / "measurements.jsonl").read_text(encoding="utf-8").splitlines())
    assert "1 skipped" in found["summary"] and "failed" not in found["summary"]
    assert found["summary"] in (tmp_path / "tests.txt").read_text(encoding="utf-8")


def test_missing_packages_are_named(module_of: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = module_of("gpu_needs")
    wanted = needs.needed()
    assert {"hjson", "annotated-types", "pydantic-core", "httpcore2"} <= wanted.keys() and "wandb" not in wanted
    monkeypatch.setattr(needs, "installed", lambda name: None if name == "hjson" else "1")
    with pytest.raises(SystemExit, match=r"lacks: hjson==[\d.]+\. .*--wheels"):
        needs.main()
    assert needs.unlisted(["numpy", "wandb", "os"]) == ["wandb"]
    head = (root / "benchmarks" / "gpu.sh").read_text(encoding="utf-8")
    for name in ("megatron-core", "hjson", "annotated-types", "pydantic", "pydantic-core", "orjson", "deepspeed"):
        assert f" {name}=={wanted[name]}" in head, f"{name}: not the version of requirements.lock"


def test_what_no_longer_fits_is_left_out(module_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = module_of("gpu")
    given = benchmark.argparse.Namespace(tiny=False, minutes=1.0, results=tmp_path, only=[], set=[])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(benchmark, "make_data", lambda *_: None)
    monkeypatch.setattr(benchmark, "measure", lambda name, *_: {"failed": "it was begun"})
    assert benchmark.run_part("dense", given, tmp_path) == []  # 45 s, and the shortest is thought to take 50
    found = benchmark.read_lines(tmp_path)
    assert [one["name"] for one in found] == list(benchmark.PARTS["dense"]) and all("left_out" in one for one in found)


def test_the_table_shows_a_run_that_failed(module_of: Any, tmp_path: Path) -> None:
    benchmark, table = module_of("gpu"), module_of("gpu_table")
    run = benchmark.Watched(12, [(1.0, "out of memory")], 10**9)
    facts = {"device": "cpu", "versions": {"torch": "2"}, "settings": [], **benchmark.facts_of(run, tmp_path)}
    plan = {"batch": "1 × 1 × 8", "precision": "bf16", "least_bytes": 10**9, "ample_bytes": 2 * 10**9}
    benchmark.add_line(tmp_path, {"name": "a", **facts, **plan, "failed": "exit code 12"})
    text = "\n".join(table.lines_of(table.measurements(tmp_path)))
    assert "| a | – | 1 × 1 × 8 bf16 | – | n/a |" in text and "- a: FAILED, exit code 12" in text
