"""The options of the command line that are not settings, the same for every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zerokara.errors import SAME_COMMAND


@dataclass(frozen=True)
class Options:
    """The options of the command line that are not settings."""

    config_path: Path
    overrides: Sequence[str] = ()
    redo: bool = False
    dry_run: bool = False
    write: bool = False
    verify_resume: int | None = None
    """Number of steps in which to verify that a run resumes, instead of running it; None to run."""
    evaluate: str | None = None
    """Checkpoint to validate instead of running: a folder, a name, a step, or "" for the newest; None to run."""
    hours: float | None = None
    """Hours of training that there are; None for no limit."""
    tokens: float | None = None
    """Tokens to train on; None for no limit."""
    fit: float | None = None
    """Minutes in which small models are trained to fit a scaling law; None for none."""
    join: str | None = None
    """Where the first of several machines waits for this one; None on the first, or on a lone one."""
    host: str | None = None
    """The address of this machine, the first of several; None for that of its default route."""
    again: str = SAME_COMMAND
    """The command that resumes this one."""
