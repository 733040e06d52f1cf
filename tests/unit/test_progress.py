"""Progress lines, and numbers with their units."""

from __future__ import annotations

import io
import re
import time

import pytest

from zerokara import progress


def test_plain_progress_lines_tell_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    with progress.Progress("encoding", total=4_000_000, unit="B", stream=stream) as bar:
        bar.note(docs=3)
        bar.advance(1_000_000)
    assert stream.getvalue().startswith("encoding: 1.0 MB of 4.0 MB (25%), ")
    assert "left" in stream.getvalue() and "docs 3" in stream.getvalue()


def test_an_estimated_total_is_never_passed_and_what_was_done_before_has_no_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    monkeypatch.setattr(progress, "LINE_INTERVAL_SECONDS", 0.0)
    stream = io.StringIO()
    with progress.Progress("training", total=10, unit="round", stream=stream, done=5) as bar:
        bar.advance(0)
        assert "left" not in stream.getvalue().splitlines()[-1], "nothing is done yet"
        now = 2.0
        bar.advance(2)
        assert "7 of 10 (70%), 3.0 s left" in stream.getvalue().splitlines()[-1]
        bar.advance(4)
        last = stream.getvalue().splitlines()[-1]
        assert "11 of 11 (100%)" in last and "left" not in last


def test_on_a_terminal_too_what_was_done_before_has_no_rate() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with progress.Progress("pruning", total=4, unit="round", stream=stream, done=1) as bar:
        bar.advance(0)
        assert re.search(r"pruning: +25%.* 1/4 \[00:00<\?", stream.getvalue())
        time.sleep(0.6)
        bar.advance(1)
        assert re.search(r"pruning: +50%.* 2/4 \[00:00<00:0\d", stream.getvalue())
        bar.advance(3)
        bar.advance(0)
        assert "5/5" in stream.getvalue()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (progress.plural(1, "process", "processes"), "1 process"),
        (progress.plural(2400, "process", "processes"), "2,400 processes"),
        (progress.plural(0, "file"), "0 files"),
        (progress.bytes_text(999), "999 B"),
        (progress.bytes_text(12_345_678), "12.3 MB"),
        (progress.count_text(12_345), "12.3k"),
        (progress.count_text(1_230_000_000), "1.23B"),
        (progress.seconds_text(4.21), "4.2 s"),
        (progress.seconds_text(200), "3 min 20 s"),
        (progress.seconds_text(18_720), "5 h 12 min"),
        (progress.seconds_text(180_000), "2 d 2 h"),
        (progress.seconds_text(float("inf")), "?"),
    ],
)
def test_units(text: str, expected: str) -> None:
    assert text == expected
