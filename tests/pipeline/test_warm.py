"""A program in a fork of the warm Python lives and ends as in an interpreter of its own."""

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
print(os.getcwd(), os.environ.get("WORD"), sys.argv[1:], __name__, "WARM_PYTHON" in os.environ, sys.path[:1])
print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), os.path.exists("/proc/self/fd/3"))
what = sys.argv[1]
print("typed", sys.stdin.readline(), flush=what == "wait")
if what == "wait":
    time.sleep(60)
elif what == "leave":
    sys.exit("a message" if sys.argv[2] == "text" else int(sys.argv[2]))
elif what == "raise":
    raise ValueError("what is wrong")
elif what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(python: str, folder: Path, *arguments: str, number: int = 0) -> tuple[int, str, str]:
    """Exit code, output and last line of the errors of the program, to which a signal is sent once it waits."""
    environment = {**os.environ, "WORD": "ä b", "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    for name in ("PYTHONUNBUFFERED", *(("WARM_PYTHON",) if python == sys.executable else ())):
        environment.pop(name, None)
    program = ["-c", PROGRAM] if arguments[0] == "code" else [str(folder / "program.py")]
    process = subprocess.Popen(
        [python, *program, *arguments], cwd=folder, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
    )  # fmt: skip
    assert process.stdin and process.stdout and process.stderr
    process.stdin.write("a line\n")
    process.stdin.flush()
    printed = ""
    while number and "typed" not in printed:
        printed += process.stdout.readline()
        assert process.poll() is None
    if number:
        process.send_signal(number)
    # To the end of the streams, which comes when nobody can write any more: it ends with whoever started it.
    rest, errors = process.communicate(timeout=60)
    return process.returncode, printed + rest, errors.strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        (("leave", "0"), 0), (("leave", "130"), 0), (("leave", "text"), 0), (("code",), 0), (("raise",), 0),
        (("kill",), 0), (("wait",), signal.SIGTERM), (("wait",), signal.SIGINT), (("wait",), signal.SIGKILL),
    ],
)  # fmt: skip
def test_streams_environment_signals_and_end(
    warm_python: None, tmp_path: Path, arguments: tuple[str, ...], number: int
) -> None:
    if warm.python() == sys.executable:
        pytest.skip("there is no warm Python here (warm.warm_server)")
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    expected = run(sys.executable, tmp_path, *arguments, number=number)
    assert run(warm.python(), tmp_path, *arguments, number=number) == expected
    assert expected[0] in (0, 130, 1, -number, -signal.SIGKILL) and ("ä b" in expected[1]) == (arguments[0] != "kill")
