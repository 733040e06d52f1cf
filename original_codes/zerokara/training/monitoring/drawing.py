"""Keeps the plots of a run fresh while it is trained, in a process of its own: drawing takes seconds of Python.

The process has one thread, and while training goes on the lowest priority. There is never more than one, and after each
it is quiet for ten times as long as that took. What fails in there ends nothing but the drawing, and is told once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

_MODULE = "zerokara.training.monitoring.plots"
_QUIET = 10.0
"""Times as long as a drawing took, until the next may begin."""
_LAST_SECONDS = 60.0
"""How long the end of a run waits for its last pictures."""


class Drawing:
    """The plots of one run folder."""

    def __init__(self, run_dir: Path, log: Callable[[str], None]):
        self._run_dir, self._log = run_dir, log
        self._process: subprocess.Popen[str] | None = None
        self._began = self._quiet_until = 0.0
        self._told = False

    def refresh(self) -> None:
        """Draw what is recorded by now, unless a drawing is at work or was a moment ago."""
        if self._is_idle() and time.monotonic() >= self._quiet_until:
            self._start(niceness=19)

    def finish(self) -> None:
        """Draw for the last time, and wait for it."""
        if self._process is not None:
            self._process.kill()  # its pictures would be old; each appears whole or not at all
            self._process.wait()
            self._process = None
        self._start()
        deadline = time.monotonic() + _LAST_SECONDS
        while not self._is_idle():
            if self._process is not None and time.monotonic() > deadline:
                self._process.kill()
                self._tell(f"not drawn within {_LAST_SECONDS:g} s")
            time.sleep(0.02)

    def _start(self, niceness: int = 0) -> None:
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        # CUDA is not for it, nor is what the launcher tells the training processes.
        hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(self._run_dir), str(niceness)],
                env={**os.environ, **threads, **hidden},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            self._tell(str(error))
        self._began = time.monotonic()

    def _is_idle(self) -> bool:
        """Whether no drawing is at work; takes note of one that has ended."""
        process = self._process
        if process is None:
            return True
        if process.poll() is None:
            return False
        self._process = None
        self._quiet_until = time.monotonic() + _QUIET * (time.monotonic() - self._began)
        if process.stderr is not None:
            with process.stderr as stream:
                words = stream.read()
            if process.returncode:
                self._tell((words.strip() or f"exit code {process.returncode}").splitlines()[-1])
        return True

    def _tell(self, words: str) -> None:
        if not self._told:
            self._log(f"plots: {words}; the training goes on")
        self._told = True
