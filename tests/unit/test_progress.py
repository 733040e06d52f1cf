"""Progress lines, and numbers with their units."""

from __future__ import annotations

import io
import re
import sys

import pytest

from zerokara import progress


def test_plain_progress_lines_tell_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with progress.Progress("encoding", total=4_000_000, unit="B") as bar:
        bar.set_postfix(docs=3, refresh=False)
        now = 9.0
        bar.advance(500_000)
        assert not stream.getvalue(), "short work shows none"
        now = 20.0
        bar.advance(500_000)
    assert stream.getvalue() == "encoding:  25% 1.00M/4.00M [00:20<01:00, 50.0kB/s, docs=3]\n"


def test_an_estimated_total_is_never_passed_and_what_was_done_before_has_no_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    monkeypatch.setattr(progress, "LINE_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with progress.Progress("training", total=10, unit="round", done=5) as bar:
        bar.advance(0)
        assert "50% 5/10 [00:00<?" in stream.getvalue().splitlines()[-1], "nothing is done yet"
        now = 2.0
        bar.advance(2)
        assert "70% 7/10 [00:02<00:03" in stream.getvalue().splitlines()[-1]
        bar.advance(4)
    assert "100% 11/11 [00:02<00:00" in stream.getvalue().splitlines()[-1]


def test_on_a_terminal_too_what_was_done_before_has_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    with progress.Progress("pruning", total=4, unit="round", done=1) as bar:
        assert not stream.getvalue(), "short work shows none"
        now = 0.6
        bar.advance(0)
        assert re.search(r"pruning: +25%.* 1/4 \[00:00<\?", stream.getvalue())
        now = 0.9
        bar.advance(1)
        assert re.search(r"pruning: +50%.* 2/4 \[00:00<00:0\d", stream.getvalue())
        now = 2.0
        bar.advance(3)
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
