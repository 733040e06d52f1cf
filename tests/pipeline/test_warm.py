"""A program in a fork of the warm Python lives and ends as in an interpreter of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm

PROGRAM = """
import atexit, os, signal, sys, time
atexit.register(print, "at exit")
print(os.getcwd(), os.environ.get("WORD"), sys.argv[1:], __name__, sys.stdin.read(), "WARM_PYTHON" in os.environ)
print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), os.path.exists("/proc/self/fd/3"))
print(sys.path[:1], "torch" in sys.modules, file=sys.stderr)
what = sys.argv[1]
if what == "wait":
    print("waiting", flush=True)
    time.sleep(60)
elif what == "exit":
    sys.exit(int(sys.argv[2]))
elif what == "leave":
    sys.exit("a message")
elif what == "raise":
    raise ValueError("what is wrong")
elif what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""
INTERPRETERS = "warm", "own"


@pytest.fixture(params=INTERPRETERS)
def start(request: pytest.FixtureRequest, warm_python: None, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Start the program in either, the same way."""
    if warm.python() == sys.executable:
        pytest.skip("there is no warm Python here (warm.warm_server)")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    python, removed = (warm.python(), set()) if request.param == "warm" else (sys.executable, {"WARM_PYTHON"})
    removed.add("PYTHONUNBUFFERED")

    def started(*arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "WORD": "ä b", "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
        environment = {name: environment[name] for name in environment.keys() - removed}
        program = ["-c", PROGRAM] if arguments[0] == "code" else [str(script)]
        return subprocess.Popen(
            [python, *program, *arguments], cwd=tmp_path, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
        )  # fmt: skip

    return started


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("exit", "0"), 0, ""),
        (("exit", "130"), 130, ""),
        (("code",), 0, ""),
        (("leave",), 1, "a message"),
        (("raise",), 1, "ValueError: what is wrong"),
        (("kill",), -signal.SIGKILL, ""),
    ],
)
def test_streams_environment_and_end(start, arguments, code, told, tmp_path, request) -> None:  # type: ignore[no-untyped-def]
    process = start(*arguments)
    printed, errors = process.communicate("typed", timeout=60)
    assert process.returncode == code and told in errors
    if code == -signal.SIGKILL:
        assert not printed  # what was not written yet is lost
        return
    expected = f"{tmp_path} ä b {list(arguments)} __main__ typed False\n"
    handlers = "0 <built-in function default_int_handler> False"
    assert printed == f"{expected}{handlers}\nat exit\n"
    assert errors.startswith(f"['{tmp_path}'] {'warm' in request.node.name}\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_it(start, number) -> None:  # type: ignore[no-untyped-def]
    process = start("wait")
    process.stdin.close()
    process.stdin = None
    while process.stdout.readline() != "waiting\n":
        assert process.poll() is None
    process.send_signal(number)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == -number and ("at exit" in printed) == (number == signal.SIGINT)


def test_it_ends_with_whoever_started_it(start) -> None:  # type: ignore[no-untyped-def]
    process = start("wait")
    process.stdin.close()
    while process.stdout.readline() != "waiting\n":
        assert process.poll() is None
    process.kill()
    process.wait()
    process.stdout.read()  # to the end of the file, which comes when nobody can write any more
