"""Run a numbered script with the project's own Python, whichever one the user called it with. Standard library only."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def enter(root: str) -> None:
    """Re-execute with ``.venv/bin/python`` when `setup.sh` has made it and it is not the one that runs.

    What this process starts finds no packages in the current folder.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    environment = Path(root) / ".venv"
    python = environment / "bin" / "python"
    if python.exists() and Path(sys.prefix).resolve() != environment.resolve():
        os.execv(python, [str(python), *sys.argv])
