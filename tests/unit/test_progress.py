"""Progress lines, and numbers with their units."""

import io
import re
import subprocess
import sys

import pytest

from zerokara.base import progress


def test_a_terminal_that_takes_nothing_holds_nobody_up() -> None:
    """Ctrl-S, or a lost connection: neither the training nor its end waits."""
    program = (
        "import sys\nfrom zerokara.base import progress\n"
        "with progress.logging_in_background():\n"
        "    for number in range(3 * progress._MAX_WAITING): progress.log(f'{number:0100}')\n"
        "    print('trained', file=sys.stderr)\n"
        "from zerokara.training.processes.supervision import leave\nleave(5)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None and process.stderr.read() == b"trained\n"
        assert process.wait(30) == 5, "nobody has read a line"
        assert process.stdout is not None and process.stdout.read(101) == b"0" * 100 + b"\n"


def test_lines_in_the_background_keep_their_order(capfd: pytest.CaptureFixture[str]) -> None:
    with progress.logging_in_background():
        for number in range(100):
            progress.log(str(number))
    progress.log("100")
    assert capfd.readouterr().out.split() == [*map(str, range(101))]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


def test_plain_progress_lines_tell_rate_and_time_left(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with progress.Progress("encoding", total=4_000_000, unit="B") as bar:
        bar.set_postfix(docs=3, refresh=False)
        clock[0] = 9.0
        bar.advance(500_000)
        assert not stream.getvalue(), "short work shows none"
        clock[0] = 20.0
        bar.advance(500_000)
    assert stream.getvalue() == "encoding:  25% 1.00M/4.00M [00:20<01:00, 50.0kB/s, docs=3]\n"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_estimated_total_is_never_passed_and_what_was_done_before_has_no_rate(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(progress, "LINE_INTERVAL_SECONDS", 0.0)
    with progress.Progress("training", total=10, unit="round", done=5) as bar:
        assert not (is_terminal and stream.getvalue()), "short work shows none"
        for seconds, amount, expected in (
            (0.6, 0, r"50%.* 5/10 \[00:00<\?"),  # nothing is done yet
            (2.0, 2, r"70%.* 7/10 \[00:02<00:0[1-4]"),  # (5 + 2) / 2 s would leave none
            (3.0, 4, r"100%.* 11/11 \[00:03<00:00"),
        ):
            clock[0] = seconds
            bar.advance(amount)
            assert re.search(expected, stream.getvalue()), stream.getvalue()


def test_a_warning_is_the_last_thing_that_a_step_prints(capsys: pytest.CaptureFixture[str]) -> None:
    progress.summary("done", [("warning", "worse than before"), ("loss", "2.0")], "step 4")
    assert capsys.readouterr().out.endswith("  loss     2.0\nnext: step 4\nwarning: worse than before\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (progress.plural(2400, "process", "processes"), "2,400 processes"),
        (progress.plural(0, "file"), "0 files"),
        (progress.bytes_text(12_345_678), "12.3 MB"),
        (progress.count_text(1_230_000_000), "1.23B"),
        (progress.count_text(999_499), "999k"),
        (progress.count_text(999_500), "1M"),
        (progress.count_text(2.5e12), "2.5T"),
        (progress.seconds_text(4.21), "4.2 s"),
        (progress.seconds_text(200), "3 min 20 s"),
        (progress.seconds_text(180_000), "2 d 2 h"),
        (progress.seconds_text(float("inf")), "?"),
    ],
)
def test_units(text: str, expected: str) -> None:
    assert text == expected
