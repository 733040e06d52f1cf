"""The numbered steps. This file runs before `.venv` is entered: standard library only."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def enter(root: str) -> None:
    """Re-execute with ``.venv/bin/python``, if `setup.sh` has created it and it is not the one that runs.

    Processes started from here import no packages from the current folder.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    environment = Path(root) / ".venv"
    python = environment / "bin" / "python"
    if python.exists() and Path(sys.prefix).resolve() != environment.resolve():
        os.execv(python, [str(python), *sys.argv])
