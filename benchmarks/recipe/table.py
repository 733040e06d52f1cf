"""The results of the contest as tables, one for each corpus: ``python -m benchmarks.recipe.table OUT``.

Means over the seeds, with a 95 % interval of Student's t, and by how much ours is below the best other one.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = "results.jsonl"
READINGS = ("stream", "begin")
"""The two of `score.py`."""
OURS = "zerokara"
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Two-sided 95 % points by number of runs."""
TOLERANCE = 0.05
"""Of the wall-clock; beyond it a row is marked."""
COLUMNS = ("system", "bits per byte", "95 %", "lowest … highest", "seeds", "precision", "million tokens", "steps",
           "minutes")  # fmt: skip
GROUP = ("corpus", "size", "minutes", "seq_len", "threads")
"""What the runs of a table have in common."""


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """JSON lines; a file that is not there has none."""
    if path.exists():
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def results(out: Path) -> list[dict[str, Any]]:
    """A line for each system and seed: the last one, which a newer recipe or another try wrote."""
    latest = {tuple(found[name] for name in (*GROUP, "system", "seed")): found for found in lines_of(out / RESULTS)}
    return list(latest.values())


def tables(found: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of Markdown."""
    groups: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = {}
    for one in found:
        by_system = groups.setdefault(tuple(one[name] for name in GROUP), {})
        by_system.setdefault(one["system"], []).append(one)
    for group, by_system in groups.items():
        corpus, size, minutes, seq_len, threads = group
        yield f"\n{corpus}: {size}, {minutes:g} minutes, sequences of {seq_len}, {threads} threads\n"
        yield f"| {' | '.join(COLUMNS)} |"
        yield "|---|" + "---:|" * (len(COLUMNS) - 1)
        numbers = {system: values(some) for system, some in by_system.items()}
        for system in sorted(by_system, key=lambda name: statistics.mean(numbers[name] or [1e9])):
            yield row(system, by_system[system], numbers[system], minutes)
        yield from margin({system: some for system, some in numbers.items() if some})


def values(some: list[dict[str, Any]]) -> list[float]:
    """Bits per byte of a system's runs, in the reading that is the better one for it on average."""
    done = [one["bits_per_byte"] for one in some if "bits_per_byte" in one]
    return min(([one[reading] for one in done] for reading in READINGS), key=sum, default=[]) if done else []


def row(system: str, some: list[dict[str, Any]], numbers: list[float], minutes: float) -> str:
    """A system's line."""
    done = [one for one in some if "bits_per_byte" in one]
    failed = [f"{system}, seed {one['seed']}: {one['error']}" for one in some if "error" in one]
    if not done:
        return f"| {system} | failed | {' | ' * (len(COLUMNS) - 4)}{failed[0]} |"
    taken = [one["seconds"] / 60 for one in done]
    off = " (!)" if any(abs(each / minutes - 1) > TOLERANCE for each in taken) else ""
    interval = "–"
    if (runs := len(numbers)) in STUDENT_T:
        interval = f"± {STUDENT_T[runs] * statistics.stdev(numbers) / runs**0.5:.4f}"
    missing = f", {len(failed)} failed" if failed else ""
    return (
        f"| {system} | {statistics.mean(numbers):.4f} | {interval} | {min(numbers):.4f} … {max(numbers):.4f} "
        f"| {runs}{missing} | {done[0]['precision']} | {statistics.mean(one['tokens'] for one in done) / 1e6:.2f} "
        f"| {statistics.mean(one['steps'] for one in done):.0f} | {min(taken):.2f} … {max(taken):.2f}{off} |"
    )


def margin(numbers: dict[str, list[float]]) -> Iterator[str]:
    """How far ours is below the best of the others."""
    others = {system: some for system, some in numbers.items() if system != OURS}
    if OURS not in numbers or not others:
        return
    best = min(others, key=lambda name: statistics.mean(others[name]))
    below = 1 - statistics.mean(numbers[OURS]) / statistics.mean(others[best])
    worst = 1 - max(numbers[OURS]) / min(others[best])
    seeds = f"its worst seed {worst:.2%} below that one's best"
    yield f"\n{OURS} is {below:.2%} below {best}, the best other one ({seeds})."


if __name__ == "__main__":
    for line in tables(results(Path(sys.argv[1]))):
        print(line)
