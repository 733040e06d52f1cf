"""Which checkpoints are kept: the newest, the best, every so many steps; and the files that name the newest and best.

Nothing is deleted unless a whole checkpoint stands, and what is broken never counts as one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from zerokara.checkpoint.folders import VALIDATION_FACT, all_steps, folder_of, outline, remove
from zerokara.durable import write_text

LATEST_NAME = "latest"
BEST_NAME = "best"


@dataclass(frozen=True)
class Retention:
    """What is kept."""

    keep_last: int
    """So many of the newest; at least 1."""
    keep_every: int = 0
    """And every checkpoint whose step is a multiple of this; 0 for none."""
    keep_best: bool = False
    """And the one with the lowest validation loss."""


def prune(run_dir: Path, retention: Retention, broken: Collection[int] = ()) -> list[Path]:
    """Delete what `retention` does not keep, and what is broken; gives the deleted.

    `broken` are steps whose folder was found broken though its sizes are right.
    """
    whole = _whole(run_dir, broken)
    if not whole:
        return []
    kept = set(sorted(whole)[-retention.keep_last :])
    if retention.keep_every:
        kept |= {step for step in whole if step % retention.keep_every == 0}
    best = _best(whole)
    if retention.keep_best and best is not None:
        kept.add(best)
    doomed = [folder_of(run_dir, step) for step in all_steps(run_dir) if step not in kept]
    for folder in doomed:
        remove(folder)
    return doomed


def mark(run_dir: Path, broken: Collection[int] = ()) -> None:
    """Let `latest` and `best` name the newest whole checkpoint and the one with the lowest validation loss."""
    whole = _whole(run_dir, broken)
    for name, step in ((LATEST_NAME, max(whole, default=None)), (BEST_NAME, _best(whole))):
        path = run_dir / name
        if step is None:
            path.unlink(missing_ok=True)
            continue
        line = f"{folder_of(run_dir, step).name}\n"
        if not path.exists() or path.read_text(encoding="utf-8", errors="replace") != line:
            write_text(path, line)


def _whole(run_dir: Path, broken: Collection[int]) -> dict[int, float | None]:
    """Step → validation loss of each checkpoint that is there."""
    records = {step: outline(folder_of(run_dir, step)) for step in all_steps(run_dir) if step not in broken}
    return {step: record.facts.get(VALIDATION_FACT) for step, record in records.items() if record is not None}


def _best(whole: dict[int, float | None]) -> int | None:
    """The newest of those with the lowest loss."""
    losses = [(loss, -step) for step, loss in whole.items() if loss is not None]
    return -min(losses)[1] if losses else None
