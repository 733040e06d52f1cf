"""Progress lines, and numbers with their units."""

from __future__ import annotations

import io

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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
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
