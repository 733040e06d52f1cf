"""Console output of a step: lines, progress with rate and time left, a closing summary.

On a terminal, progress is a bar (tqdm); elsewhere, as in a log file, it is a plain line every few seconds.
"""

import contextlib
import math
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

LINE_INTERVAL_SECONDS = 10.0
_MAX_WAITING = 1000
# Controls other than tab and line end; and surrogates, which stand for bytes of a file name that are not UTF-8.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def plain(text: str) -> str:
    """Escape control characters and unprintable ones: a file may have any name."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def indented(text: str) -> str:
    """Return `text` as a code block of Markdown, indented at every kind of line end."""
    return "\n".join(f"    {plain(line)}".rstrip() for line in text.splitlines() or [""])


_waiting: queue.Queue[str] | None = None


def log(text: str) -> None:
    """Print a line at once. If the output goes to a file on a full disk, the line is lost, and nothing else."""
    if (waiting := _waiting) is None:
        with contextlib.suppress(OSError):
            print(plain(text), flush=True)
    else:
        with contextlib.suppress(queue.Full):
            waiting.put_nowait(text)


@contextlib.contextmanager
def logging_in_background() -> Iterator[None]:
    """Let a thread print the lines of `log` in the block: a terminal may block (Ctrl-S, a lost connection).

    A line is lost if `_MAX_WAITING` lines are waiting, or if it is still waiting a second after the block.
    """
    global _waiting
    waiting: queue.Queue[str] = queue.Queue(_MAX_WAITING)
    _waiting = waiting

    def print_all() -> None:
        while _waiting is waiting:
            line = f"{plain(waiting.get())}\n"
            with contextlib.suppress(Exception):  # there may be no output, or a full disk
                rest = line.encode(sys.stdout.encoding, "backslashreplace")
                while rest:  # `print` would hold a lock that the process needs to exit
                    rest = rest[os.write(sys.stdout.fileno(), rest) :]
            waiting.task_done()

    threading.Thread(target=print_all, daemon=True).start()
    try:
        yield
    finally:
        deadline = time.monotonic() + 1
        while waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)
        _waiting = None


class Progress(tqdm):
    """Progress of one piece of long work, used as a context manager: what has been done, rate and time left."""

    total: float | None
    monitor_interval = 0  # no thread that draws a bar of its own accord

    def __init__(self, label: str, total: float | None = None, unit: str = "it", done: float = 0):
        """`done` of the `total` was done before, and does not count in the rate; the total may be an estimate.
        Without a unit it shows the time alone."""
        self._is_drawn = sys.stderr.isatty()
        interval, delay = (0.1, 0.5) if self._is_drawn else (LINE_INTERVAL_SECONDS,) * 2  # short work shows none
        form: dict[str, Any] = {"dynamic_ncols": True} if self._is_drawn else {"ncols": 0, "position": 0}
        form |= {"unit": unit, "unit_scale": unit in ("B", "s"), "initial": done, "miniters": 0}
        form |= {} if unit else {"bar_format": "{desc}: {elapsed}{postfix}"}
        super().__init__(None, label, total, leave=False, mininterval=interval, delay=delay, **form)

    def advance(self, amount: float = 1) -> None:
        """Count `amount` more units as done; 0, every second where nothing advances, shows that the work continues."""
        if self.total:
            self.total = max(self.total, self.n + amount)  # it was estimated too low
        self.update(amount)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Draw the bar, or print a line where nothing can be drawn (tqdm would end each with a carriage return)."""
        if self._is_drawn:
            return bool(super().display(msg, pos))
        if msg is None:
            with contextlib.suppress(OSError):  # of a full disk, as in `log`; tqdm would not release its lock
                print(self, file=self.fp, flush=True)
        return False


Progress.set_lock(threading.RLock())  # tqdm's own is one of multiprocessing too, and would fix its start method


def summary(title: str, rows: list[tuple[str, str]], next_command: str | None = None) -> None:
    """Print what a step has done, as aligned rows, the next command, and last the rows that are warnings."""
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"\n{title}", *(f"  {name:<{width}}  {value}" for name, value in rows if name != "warning")]
    lines += [f"next: {next_command}"] if next_command else []
    log("\n".join([*lines, *(f"warning: {value}" for name, value in rows if name == "warning")]))


def bytes_text(number: float) -> str:
    """Bytes in decimal units: ``12.3 MB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} B"


def count_text(number: float) -> str:
    """A count short enough for a line: ``950``, ``12.3k``, ``4.56M``, ``1.23B``."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= 0.9995 * size:  # which three digits round to 1
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}" if float(number).is_integer() or abs(number) >= 100 else f"{number:.2f}"


def plural(number: int, singular: str, plural: str = "") -> str:
    """A number with its noun: ``1 process``, ``2,400 processes``; the plural adds an s unless it is given."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def first_of(names: Sequence[str], most: int = 1) -> str:
    """The first of some names, and the number of the others: ``a.txt, b.txt and 3 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if names[most:] else "")


def seconds_text(seconds: float) -> str:
    """A duration short enough for a line: ``4.2 s``, ``3 min 20 s``, ``5 h 12 min``, ``2 d 3 h``."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
