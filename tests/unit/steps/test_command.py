"""How a step ends: exit codes, messages without secrets or control characters, a reader that has left."""

import ast
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import zerokara
from zerokara.base import progress
from zerokara.base.errors import Fault, RunError, UserError, guarded, shown
from zerokara.steps import __main__

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(zerokara.__file__).parents[1])}


def test_a_traceback_holds_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        try:
            raise ValueError("https://ada:secret@hub/f?X-Amz-Signature=ab12")
        except ValueError as error:
            raise KeyError("hf_abcdefghijABCDEFGHIJ0123456789") from error

    assert guarded(broken) == 1
    printed = capsys.readouterr().err
    assert "ValueError: https://…@hub/f?…" in printed and "KeyError: 'hf_…'" in printed and "in broken" in printed


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (UserError([Fault(where="a", rule="one"), Fault(where="b", rule="two")]), 2, "error: a: one\nerror: b: two\n"),
        (RunError("broke"), 1, "failed: broke\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),  # a training process: nobody typed its command
        (FileNotFoundError(2, "No such", "a.jsonl"), 1, "failed: cannot read or write a.jsonl: No such\n"),
        (OSError("something that names no file"), 1, "Traceback … OSError: something that names no file\n"),
    ],
)
def test_exit_codes(error: BaseException, code: int, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(error)) == code
    start, _, end = printed.rpartition(" … ")
    found = capsys.readouterr().err
    assert (found.startswith(start) and found.endswith(end)) if start else found == printed


def test_a_gpu_that_another_program_holds_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    error = type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 20.00 MiB.")
    assert guarded(raising(error), "python 5_generate.py x") == 1
    found = capsys.readouterr().err
    assert found.startswith("failed: CUDA out of memory; ") and "CUDA_VISIBLE_DEVICES=" in found


def test_a_terminal_obeys_no_name_or_text_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b]0;pwned\x07\x1b[2J\r\x9b31m\udcff.jsonl\tx"

    unreadable = PermissionError(13, "Permission denied", name)
    wrong = UserError(Fault(where="config.yaml:3", value=name, rule="is of no format known here"))
    assert (guarded(raising(unreadable)), guarded(raising(wrong))) == (1, 2)
    progress.log(name)
    progress.summary("step 2: done", [(name, name)])
    printed = "".join(capsys.readouterr())
    assert printed.count("a\\x1b]0;pwned\\x07\\x1b[2J\\r\\x9b31m\\udcff.jsonl\tx") == 4
    assert f"cannot read or write {shown(name)}: " in printed
    assert not set("\x1b\x07\r\x9b\udcff") & set(printed)


def test_what_a_terminal_cannot_show_is_spelt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed := io.BytesIO(), encoding="ascii"))
    assert guarded(lambda: print("→", os.fsdecode(b"d\xe9"), flush=True)) == 0
    assert printed.getvalue() == b"\\u2192 d\\udce9\n"


@pytest.mark.parametrize(
    ("imported", "is_ignored"),
    [("zerokara.base.errors", False), ("zerokara.steps.command", False), ("numpy", True)],
)
def test_an_early_interrupt_is_no_traceback(imported: str, is_ignored: bool) -> None:
    """While the step is imported; a command in the background, which ignores it, goes on."""
    program = [sys.executable, "-X", "importtime", "-m", "zerokara.steps", "count_tokens", "--config", "nowhere.yaml"]
    ignore = (lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if is_ignored else None
    with subprocess.Popen(program, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, preexec_fn=ignore) as process:
        assert process.stderr
        for line in process.stderr:
            if line.rstrip().endswith(f" {imported}"):
                process.send_signal(signal.SIGINT)
                break
        rest = [line for line in process.stderr if not line.startswith("import time:")]
    if is_ignored:
        assert process.returncode == 2 and rest[-1].startswith("error: nowhere.yaml")
    else:
        assert (process.returncode, rest) == (-signal.SIGINT, [])


PRINTED = "from zerokara.base.errors import guarded; raise SystemExit(guarded(lambda: print('word ' * {})))"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["-c", PRINTED.format(100_000)], 141),
        (["-m", "zerokara.steps", "count_tokens", "--help"], 0),
    ],
)
def test_a_reader_that_leaves_is_no_traceback(arguments: list[str], code: int) -> None:
    """As in ``bash 2_tokenize.sh | head -1``: what is done is done, what is not done stops."""
    reading, writing = os.pipe()
    os.close(reading)
    command_line = [sys.executable, *arguments]
    environment = {**ENVIRONMENT, "PYTHONUNBUFFERED": "1" if "--help" in arguments else ""}
    done = subprocess.run(command_line, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr.count("\n")) == (code, 0 if code == 0 else 1), done.stderr


SCRIPTS = sorted(ROOT.glob("*.py"))
FIRST_READ = [*SCRIPTS, *(ROOT / "original_codes/zerokara" / name for name in ("__init__.py", "steps/__init__.py"))]
FIRST_READ.append(ROOT / "original_codes/zerokara/steps/__main__.py")


@pytest.mark.parametrize("path", FIRST_READ, ids=lambda path: path.name)
def test_python_3_6_reads_what_runs_before_the_version_is_known(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 6))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "__future__"]


@pytest.mark.parametrize("script", [path.name for path in SCRIPTS] + ["original_codes/zerokara/steps/__main__.py"])
def test_an_old_python_is_told_which_is_needed(script: str, tmp_path: Path) -> None:
    """In a folder without .venv: one line, before anything is imported that an old Python has not."""
    (tmp_path / "original_codes").symlink_to(ROOT / "original_codes")
    if not (path := tmp_path / script).exists():
        path.write_bytes((ROOT / script).read_bytes())
    program = (
        "import sys\n"
        "sys.version_info = (3, 8, 10, 'final', 0)\n"
        "sys.path.insert(0, sys.argv[1].rpartition('/')[0])\n"
        "sys.modules |= dict.fromkeys(['argparse', 'dataclasses', 'pydantic', 'ray', 'ruamel', 'typing'])\n"
        "exec(compile(open(sys.argv[1]).read(), '', 'exec'), {'__name__': '__main__', '__file__': sys.argv[1]})"
    )
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode and done.stderr.count("\n") == 1, done.stderr
    assert "Python 3.11 or later" in done.stderr and "setup.sh" in done.stderr and not done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        (["--version"], 0, f"zerokara {zerokara.__version__}"),
        ([], 0, "train_tokenizer, upload"),
        (["nothing"], 2, "usage: zerokara STEP"),
    ],
)
def test_a_step_or_the_version(
    arguments: list[str], code: int, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["zerokara", *arguments])
    monkeypatch.setattr(__main__, "prepare", lambda: None)
    assert __main__.main() == code and printed in capsys.readouterr().out
