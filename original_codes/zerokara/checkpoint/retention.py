"""Retention of checkpoints: the newest, the best, every so many steps; and the files ``latest`` and ``best``.

Only complete checkpoints are deleted, and only where the ones to keep are complete. A broken checkpoint, or one that
cannot be read at the moment, is neither deleted nor counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zerokara.checkpoint.folders import SELECTION_FACT, all_steps, check_sizes, folder_of, remove
from zerokara.durable import write_text

LATEST_NAME = "latest"
BEST_NAME = "best"


@dataclass(frozen=True)
class Retention:
    """The checkpoints to keep."""

    keep_last: int
    """Number of the newest; at least 1."""
    keep_every: int = 0
    """Also every checkpoint whose step is a multiple of this; 0 for none."""
    keep_best: bool = False
    """Also the one that validation found best."""


def prune(run_dir: Path, retention: Retention) -> list[Path]:
    """Delete the complete checkpoints that `retention` does not keep, and return their folders.

    Raises:
        OSError: the disk fails.
    """
    losses = _complete(run_dir)
    kept = set(sorted(losses)[-retention.keep_last :])
    if retention.keep_every:
        kept |= {step for step in losses if step % retention.keep_every == 0}
    best = _best(losses)
    if retention.keep_best and best is not None:
        kept.add(best)
    deleted = [folder_of(run_dir, step) for step in sorted(losses) if step not in kept]
    for folder in deleted:
        remove(folder)
    return deleted


def write_markers(run_dir: Path) -> None:
    """Write the names of the newest complete checkpoint and of the best by validation to `latest` and `best`.

    Raises:
        OSError: the disk fails.
    """
    losses = _complete(run_dir)
    for name, step in ((LATEST_NAME, max(losses, default=None)), (BEST_NAME, _best(losses))):
        path = run_dir / name
        if step is None:
            path.unlink(missing_ok=True)
            continue
        line = f"{folder_of(run_dir, step).name}\n"
        if not path.exists() or path.read_text(encoding="utf-8", errors="replace") != line:
            write_text(path, line)


def best(run_dir: Path) -> Path | None:
    """Return the checkpoint that validation found best, as the file ``best`` names it; None where there is none."""
    marker = run_dir / BEST_NAME
    if not marker.is_file():
        return None
    folder = run_dir / marker.read_text(encoding="utf-8").strip()
    return folder if folder.is_dir() else None


def _complete(run_dir: Path) -> dict[int, float | None]:
    """Step → selection loss of each complete checkpoint."""
    records = {step: check_sizes(folder_of(run_dir, step)) for step in all_steps(run_dir)}
    return {step: record.facts.get(SELECTION_FACT) for step, record in records.items() if record is not None}


def _best(losses: dict[int, float | None]) -> int | None:
    """Step with the lowest loss; of equal ones the newest."""
    validated = [(loss, -step) for step, loss in losses.items() if loss is not None]
    return -min(validated)[1] if validated else None
