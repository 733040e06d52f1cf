"""How a step ends: exit codes, messages without secrets or control characters, a reader that has left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zerokara import progress
from zerokara.errors import Fault, RunError, UserError, guarded, shown
from zerokara.steps import command


def test_a_traceback_holds_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        try:
            raise ValueError("https://ada:secret@hub/f?X-Amz-Signature=ab12")
        except ValueError as error:
            raise KeyError("hf_abcdefghijABCDEFGHIJ0123456789") from error

    assert guarded(broken) == 1
    printed = capsys.readouterr().err
    assert "ValueError: https://…@hub/f?…" in printed and "KeyError: 'hf_…'" in printed and "in broken" in printed


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    def raising(error: BaseException) -> int:
        def work() -> None:
            raise error

        return guarded(work)

    assert raising(UserError([Fault(where="a", rule="one"), Fault(where="b", rule="two")])) == 2
    assert raising(RunError("broke")) == 1
    assert raising(KeyboardInterrupt()) == 130
    assert guarded(lambda: None) == 0
    assert capsys.readouterr().err.splitlines()[:3] == ["error: a: one", "error: b: two", "failed: broke"]


def test_an_error_of_the_system_about_a_file_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def gone() -> None:
        raise FileNotFoundError(2, "No such file or directory", "corpus/a.jsonl")

    assert guarded(gone) == 1
    assert capsys.readouterr().err == "failed: cannot read or write corpus/a.jsonl: No such file or directory\n"

    def ours() -> None:
        raise OSError("something that names no file")

    assert guarded(ours) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback") and printed.endswith("OSError: something that names no file\n")


def test_a_terminal_obeys_no_name_or_text_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b]0;pwned\x07\x1b[2J\r\x9b31m\udcff.jsonl\tx"

    def unreadable() -> None:
        raise PermissionError(13, "Permission denied", name)

    def wrong() -> None:
        raise UserError(Fault(where="config.yaml:3", value=name, rule="is of no format known here"))

    assert (guarded(unreadable), guarded(wrong)) == (1, 2)
    progress.log(name)
    progress.log(name)
    progress.summary("step 2: done", [(name, name)])
    printed = "".join(capsys.readouterr())
    assert printed.count("a\\x1b]0;pwned\\x07\\x1b[2J\\r\\x9b31m\\udcff.jsonl\tx") == 5
    assert f"cannot read or write {shown(name)}: " in printed
    assert not set("\x1b\x07\r\x9b\udcff") & set(printed)


@pytest.mark.parametrize("step", ["count_tokens", "upload"])
def test_help_that_nobody_reads_is_no_traceback(step: str) -> None:
    """As in ``python count_tokens.py --help | head -1``."""
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONPATH": str(Path(command.__file__).parents[2])}
    command_line = [sys.executable, "-m", "zerokara.steps", step, "--help"]
    done = subprocess.run(command_line, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("imported", "is_ignored"),
    [("zerokara.errors", False), ("pydantic.main", False), ("zerokara.steps.command", False), ("numpy", True)],
)
def test_an_early_interrupt_is_one_line(imported: str, is_ignored: bool) -> None:
    """While the step is imported; a command in the background, which ignores it, goes on."""
    environment = {**os.environ, "PYTHONPATH": str(Path(command.__file__).parents[2])}
    program = [sys.executable, "-X", "importtime", "-m", "zerokara.steps", "count_tokens", "--config", "nowhere.yaml"]
    ignore = (lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if is_ignored else None
    with subprocess.Popen(program, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=ignore) as process:
        assert process.stderr
        for line in process.stderr:
            if line.rstrip().endswith(f" {imported}"):
                process.send_signal(signal.SIGINT)
                break
        rest = [line for line in process.stderr if not line.startswith("import time:")]
    if is_ignored:
        assert process.returncode == 2 and rest[-1].startswith("error: nowhere.yaml")
    else:
        assert (process.returncode, rest) == (130, ["stopped\n"])


@pytest.mark.parametrize(("words", "code"), [(1, 0), (100_000, 141)])
def test_a_reader_that_leaves_is_no_traceback(words: int, code: int) -> None:
    """As in ``bash 2_tokenize.sh | head -1``: what is done is done, what is not done stops."""
    program = f"from zerokara.errors import guarded; raise SystemExit(guarded(lambda: print('word ' * {words})))"
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONPATH": str(Path(command.__file__).parents[2]), "PYTHONUNBUFFERED": ""}
    command_line = [sys.executable, "-c", program]
    done = subprocess.run(command_line, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    printed = done.stderr.splitlines()
    assert (done.returncode, len(printed)) == (code, 0 if code == 0 else 1), printed
