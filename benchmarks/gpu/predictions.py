"""What the simulation predicts of the jobs of `gpu.sh first`, and beside it what a GPU has shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("predicted.json")
FAR = 1.25
"""A number that differs by more is marked."""


def compared(measured: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a table of the jobs that are in both: a row for the step, each part, and the peak of memory."""
    predicted = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
    yield "| job | | predicted | measured | measured over predicted |"
    yield "|---|---|---:|---:|---:|"
    for name, one in measured.items():
        if name not in predicted:
            continue
        expected, profile = predicted[name], one["profile"]
        rows = [("step, ms", 1000 * expected["step_seconds"], 1000 * profile["step_seconds"])]
        rows += [(f"{part}, ms", took, profile["parts"].get(part, 0.0)) for part, took in expected["parts"].items()]
        rows += [("waiting, ms", 0.0, profile["parts"].get("waiting", 0.0))]
        if one.get("memory_bytes"):
            rows += [("peak, GB", expected["peak_bytes"] / 1e9, one["memory_bytes"] / 1e9)]
        for what, foretold, found in rows:
            far = " **far**" if not foretold / FAR <= found <= foretold * FAR else ""
            ratio = f"{found / foretold:.2f}" if foretold else "–"
            yield f"| {name} | {what} | {foretold:,.1f} | {found:,.1f} | {ratio}{far} |"
