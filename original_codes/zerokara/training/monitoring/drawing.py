"""Draws the plots of a run while it is trained, in a process of its own: drawing is seconds of Python.

The process has one thread and, during training, the lowest priority. There is never more than one, and after each there
is a pause of ten times as long as it took. A failure ends nothing but the drawing, and is logged once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from zerokara.durable import PARTIAL_SUFFIX

FOLDER_NAME = "plots"
_MODULE = "zerokara.training.monitoring.plots"
_PAUSE_FACTOR = 10.0
"""Pause after a drawing, over the time that it took."""
_FINISH_SECONDS = 60.0
"""How long the end of a run waits for its last plots."""


class Drawing:
    """The plots of one run folder."""

    def __init__(self, run_dir: Path, log: Callable[[str], None]):
        self._run_dir, self._log = run_dir, log
        self._process: subprocess.Popen[str] | None = None
        self._started = self._paused_until = 0.0
        self._has_failed = False
        self._sweep()

    def refresh(self) -> None:
        """Draw what is recorded so far, unless a drawing is running or has just ended."""
        if self._process is not None and self._process.poll() is not None:
            self._wait()
        if self._process is None and time.monotonic() >= self._paused_until:
            self._start(niceness=19)

    def finish(self) -> None:
        """Draw for the last time, and wait for it."""
        if self._process is not None:
            self._kill(self._process)  # its plots would be out of date; each file appears whole or not at all
        self._start()
        self._wait()

    def _start(self, niceness: int = 0) -> None:
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        # It needs no GPU, and finds its modules where this process does, whatever the launcher changed.
        borders = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process, self._started = None, time.monotonic()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(self._run_dir), str(niceness)],
                env={**os.environ, **threads, **borders},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            self._log_once(str(error))

    def _wait(self) -> None:
        """Wait for the process to end, and log its failure."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            _, message = process.communicate(timeout=_FINISH_SECONDS)
            if process.returncode:
                self._log_once((message.strip() or f"exit code {process.returncode}").splitlines()[-1])
        except subprocess.TimeoutExpired:
            self._kill(process)
            self._log_once(f"not drawn within {_FINISH_SECONDS:g} s")
        self._paused_until = time.monotonic() + _PAUSE_FACTOR * (time.monotonic() - self._started)

    def _kill(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.communicate()
        self._sweep()

    def _sweep(self) -> None:
        """Delete the unfinished file of a drawing that was killed; none is running."""
        for partial in (self._run_dir / FOLDER_NAME).glob(f"*{PARTIAL_SUFFIX}"):
            partial.unlink(missing_ok=True)

    def _log_once(self, reason: str) -> None:
        if not self._has_failed:
            self._log(f"plots: {reason}; training continues")
        self._has_failed = True
