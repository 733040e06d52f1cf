"""A command followed to its end or its time limit: when it printed what, and what it held of main memory."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

KILLED = "killed: its time is over"


class Watched(NamedTuple):
    """A command that has ended."""

    code: int
    lines: list[tuple[float, str]]
    """Seconds since its start, and what it printed."""
    host_bytes: int
    """Most that all its processes held of main memory at a time; what they share counts in each."""

    def seconds_to(self, text: str) -> float | None:
        """Seconds until the first line with this text."""
        return next((seconds for seconds, line in self.lines if text in line), None)

    def told(self, pattern: str) -> str | None:
        """Group 1 of the first line that has this pattern."""
        return next((match[1] for _, line in self.lines if (match := re.search(pattern, line))), None)

    def why(self) -> str:
        """How it failed: the code, and its last lines."""
        return f"exit code {self.code}: {' | '.join(line for _, line in self.lines[-3:])}"


def watch(
    command: list[str],
    name: str,
    results: Path,
    deadline: float,
    environment: dict[str, str] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Watched:
    """Run a command to its end, or to the deadline; its output goes into the log, and `tell` gets each line."""
    started, lines = time.monotonic(), []
    process = subprocess.Popen(
        command,
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    peak = [0]
    threading.Thread(target=follow_memory, args=(process.pid, peak), daemon=True).start()
    with open(results / "log.txt", "a", encoding="utf-8") as log:
        log.write(f"── {name}: {' '.join(command)}\n")
        for line in lines_of(process, deadline):
            lines.append((time.monotonic() - started, line))
            log.write(f"{lines[-1][0]:7.1f}  {line}\n")
            log.flush()  # a call that is cut off leaves what there is
            tell(line)
    return Watched(process.wait(), lines, peak[0])


def lines_of(process: subprocess.Popen[str], deadline: float) -> Iterator[str]:
    """Yield what a process prints, line by line; at the deadline it is killed with all that it started."""
    import psutil

    printed: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout or ():
            printed.put(line.rstrip("\n"))
        printed.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (left := deadline - time.monotonic()) > 0:  # also for one that never stops printing
        try:
            line = printed.get(timeout=left)
        except queue.Empty:
            break
        if line is None:
            return
        yield line
    yield KILLED
    others = psutil.Process(process.pid).children(recursive=True)
    for each in (process, *others):  # itself first: a shell that waits for the others would end well without them
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def follow_memory(pid: int, peak: list[int]) -> None:
    """Keep the most main memory that a process and its children hold, until it ends."""
    import psutil

    while True:
        try:
            processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            held = sum(process.memory_info().rss for process in processes)
        except psutil.NoSuchProcess:
            if not psutil.pid_exists(pid):
                return
            continue
        peak[0] = max(peak[0], held)
        time.sleep(0.2)
