"""Console output of a step: an opening line, progress with rate and time left, a closing summary.

On a terminal, progress is a bar (tqdm); elsewhere, as in a log file, it is a plain line every few seconds.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
import time
from typing import IO, Any

from tqdm import tqdm

LINE_INTERVAL_SECONDS = 10.0
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Controls other than tab and line end; and surrogates, which stand for bytes of a file name that are not UTF-8."""


def plain(text: str) -> str:
    """`text` with control characters and unprintable ones escaped: a file may have any name."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def indented(text: str) -> str:
    """`text` as a code block of Markdown, indented at every kind of line end, so that no line of it starts a line."""
    return "\n".join(f"    {plain(line)}".rstrip() for line in text.splitlines() or [""])


def log(text: str) -> None:
    """Print a line at once. If the output goes to a file on a full disk, the line is lost, and nothing else."""
    with contextlib.suppress(OSError):
        print(plain(text), flush=True)


class Progress:
    """Progress of one piece of long work, used as a context manager."""

    def __init__(
        self, label: str, total: float | None = None, unit: str = "it", stream: IO[str] | None = None, done: float = 0
    ):
        """`done` of the `total` was done before, and does not count in the rate; the total may be an estimate."""
        self._label, self._unit = label, unit
        self._total = max(total, done) if total else None
        self._done = self._done_before = done
        self._stream = stream if stream is not None else sys.stderr
        self._notes: dict[str, Any] = {}
        self._started = self._last_line = time.monotonic()
        bar: dict[str, Any] = {"file": self._stream, "dynamic_ncols": True, "leave": False}
        bar |= {"unit": unit, "unit_scale": unit == "B", "initial": done, "delay": 0.5}  # short work shows none
        self._bar: Any = tqdm(None, label, total, **bar) if self._stream.isatty() else None

    def advance(self, amount: float = 1) -> None:
        """Count `amount` more units as done; 0, every second where nothing advances, shows that the work continues."""
        self._done += amount
        if self._total:
            self._total = max(self._total, self._done)  # it was estimated too low
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.update(amount)
            if not amount:
                self._bar.refresh()
        elif time.monotonic() - self._last_line >= LINE_INTERVAL_SECONDS:
            self._print()

    def note(self, **values: object) -> None:
        """Show further values beside the progress (``loss=2.31``)."""
        self._notes.update(values)
        if self._bar is not None:
            self._bar.set_postfix(self._notes, refresh=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _print(self) -> None:
        self._last_line = time.monotonic()
        seconds = self._last_line - self._started
        rate = (self._done - self._done_before) / max(seconds, 1e-9)
        shown, unit = (bytes_text, "") if self._unit == "B" else (count_text, f" {self._unit}")
        parts = []
        if self._done:
            parts.append(shown(self._done))
        if self._done and self._total:
            parts[0] += f" of {shown(self._total)} ({self._done / self._total:.0%})"
        if rate and self._total and self._done < self._total:
            parts.append(f"{seconds_text((self._total - self._done) / rate)} left")
        parts.append(f"{shown(rate)}{unit}/s" if rate else f"for {seconds_text(seconds)}")
        parts += [f"{key} {value}" for key, value in self._notes.items()]
        print(f"{self._label}: {', '.join(parts)}", file=self._stream, flush=True)


def opening(text: str) -> None:
    """Print what a step is about to do (``step 2 tokenise: 40 files, 12.3 GB → data/tokens``)."""
    print(plain(text), flush=True)


def summary(title: str, rows: list[tuple[str, str]], next_command: str | None = None) -> None:
    """Print what a step has done, as aligned rows, and the next command."""
    width = max((len(name) for name, _ in rows), default=0)
    print(f"\n{title}")
    for name, value in rows:
        print(plain(f"  {name:<{width}}  {value}"))
    if next_command:
        print(f"next: {next_command}")
    sys.stdout.flush()


def bytes_text(number: float) -> str:
    """Bytes in decimal units: ``12.3 MB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} B"


def count_text(number: float) -> str:
    """A count short enough for a line: ``950``, ``12.3k``, ``4.56M``, ``1.23B``."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}" if float(number).is_integer() or abs(number) >= 100 else f"{number:.2f}"


def plural(number: int, singular: str, plural: str = "") -> str:
    """A number with its noun: ``1 process``, ``2,400 processes``; the plural adds an s unless it is given."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


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
