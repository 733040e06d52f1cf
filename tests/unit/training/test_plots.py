"""The pictures of a run, and the process that draws them."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from zerokara.training.monitoring import drawing, plots
from zerokara.training.monitoring.drawing import Drawing


def write_run(run_dir: Path, **more: Any) -> None:
    lines: list[dict[str, Any]] = [{"step": 0, "tokens": 0, "valid_loss": 6.0, "valid_bits_per_byte": 3.0}]
    for step in range(1, 60):
        numbers = {"loss": 6 / step**0.2, "learning_rate": 0.1, "grad_norm": 1.0, "tokens_per_second": 5e3, "mfu": None}
        lines.append({"step": step, "tokens": step * 1000, **numbers, **more})
    lines.append({"step": 20, "tokens": 20_000, "resumed": True})
    lines.append({"step": 30, "tokens": 30_000, "skipped": "its loss is nan", "bad_samples": []})
    lines.append({"step": 59, "tokens": 59_000, "valid_loss": 2.7, "valid_bits_per_byte": 1.4})
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


def test_every_curve_has_its_picture_and_all_have_one(tmp_path: Path) -> None:
    write_run(tmp_path / "run", source_tokens=[10, 20], mfu=0.4, expert_load=[1.5, 2.0])
    drawn = plots.draw(tmp_path / "run")
    names = ["overview", "loss", "bits_per_byte", "learning_rate", "grad_norm", "throughput", "sources", "experts"]
    assert [path.name for path in drawn] == [f"{name}.png" for name in names]
    for path in drawn:
        head = path.read_bytes()[:24]
        width, height = struct.unpack(">II", head[16:])
        assert head.startswith(b"\x89PNG") and width >= 900 and height >= 500 and path.stat().st_size > 10_000
    assert sorted(path.name for path in (tmp_path / "run" / "plots").iterdir()) == sorted(f"{n}.png" for n in names)


def test_a_run_without_a_step_has_no_picture(tmp_path: Path) -> None:
    assert plots.draw(tmp_path) == [] and not (tmp_path / "plots").exists()


def test_a_long_curve_keeps_its_ends() -> None:
    tokens, values = plots._thinned(range(10_001), range(10_001))
    assert (tokens[0], tokens[-1], len(tokens)) == (0, 10_000, 3335) and values == tokens
    assert plots._thinned([1, 2], [3, 4]) == ([1, 2], [3, 4]) and plots._thinned([], []) == ([], [])


def test_never_two_are_drawn_at_once_and_the_last_is_waited_for(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    said: list[str] = []
    made = Drawing(tmp_path / "run", said.append)
    made.refresh()
    first = made._process
    assert first is not None
    began = time.monotonic()
    made.refresh()
    assert made._process is first and time.monotonic() - began < 0.1, "the training waited"
    made.finish()
    assert said == [] and (tmp_path / "run" / "plots" / "overview.png").exists()
    assert made._quiet_until > time.monotonic()


def test_a_drawing_that_fails_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "_MODULE", "zerokara.no_such_module")
    said: list[str] = []
    made = Drawing(tmp_path, said.append)
    made.finish()
    made.finish()
    assert len(said) == 1 and "No module named zerokara.no_such_module; the training goes on" in said[0]
