"""Which checkpoints are kept: the newest, the best, every so many steps; and the files that name the newest and best.

Only what is whole is deleted, and only where newer ones, or better ones, are whole too. What is broken, or cannot be
read just now, stays, and counts as none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zerokara.checkpoint.folders import VALIDATION_FACT, all_steps, check_sizes, folder_of, remove
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


def prune(run_dir: Path, retention: Retention) -> list[Path]:
    """Delete the whole checkpoints that `retention` does not keep; gives the deleted.

    Raises:
        OSError: the disk fails.
    """
    whole = _whole(run_dir)
    kept = set(sorted(whole)[-retention.keep_last :])
    if retention.keep_every:
        kept |= {step for step in whole if step % retention.keep_every == 0}
    best = _best(whole)
    if retention.keep_best and best is not None:
        kept.add(best)
    doomed = [folder_of(run_dir, step) for step in sorted(whole) if step not in kept]
    for folder in doomed:
        remove(folder)
    return doomed


def write_markers(run_dir: Path) -> None:
    """Let `latest` and `best` name the newest whole checkpoint and the one with the lowest validation loss.

    Raises:
        OSError: the disk fails.
    """
    whole = _whole(run_dir)
    for name, step in ((LATEST_NAME, max(whole, default=None)), (BEST_NAME, _best(whole))):
        path = run_dir / name
        if step is None:
            path.unlink(missing_ok=True)
            continue
        line = f"{folder_of(run_dir, step).name}\n"
        if not path.exists() or path.read_text(encoding="utf-8", errors="replace") != line:
            write_text(path, line)


def _whole(run_dir: Path) -> dict[int, float | None]:
    """Step → validation loss of each checkpoint that is whole."""
    records = {step: check_sizes(folder_of(run_dir, step)) for step in all_steps(run_dir)}
    return {step: record.facts.get(VALIDATION_FACT) for step, record in records.items() if record is not None}


def _best(whole: dict[int, float | None]) -> int | None:
    """The newest of those with the lowest loss."""
    losses = [(loss, -step) for step, loss in whole.items() if loss is not None]
    return -min(losses)[1] if losses else None
