"""The options of the command line that are no settings, the same for every step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SAME_COMMAND = "the same command"
"""For a step that was called neither by its script nor as a module."""


@dataclass(frozen=True)
class Options:
    """The options of the command line that are no settings."""

    config_path: Path
    overrides: tuple[str, ...] = ()
    redo: bool = False
    dry_run: bool = False
    write: bool = False
    verify_resume: int | None = None
    """Steps of a proof that a run resumes, instead of the run; None for the run."""
    evaluate: str | None = None
    """Checkpoint to evaluate, instead of the run: a folder, a name, a step, or "" for the newest; None for the run."""
    again: str = SAME_COMMAND
    """The command that resumes what this one began."""
