"""Programs that are started from a Python which has everything imported (`warm.server`).

Importing torch, megatron-core and the rest is most of what a small run costs. A test module that starts many programs
says ``pytestmark = pytest.mark.usefixtures("warm_python")``: then the shell scripts end in a fork of that Python, and
`python` is what to start a numbered script with. All else is as it was: the scripts run, the programs are processes of
their own with the environment, folder and streams that the test gives them, and signals reach them. What the start of
an interpreter does is tested with real ones: test_run_all, test_current_folder, test_gpu_benchmark, test_real_command.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
STARTS = """exec() { # of an interpreter, at the end of a step's script
    shift
    builtin exec "$WARM_PYTHON" "$@"
}
"""


def python() -> str:
    """The interpreter to start programs with, in a test that uses `warm_python`."""
    return os.environ.get("WARM_PYTHON", sys.executable)


def python_of(server: Path | None) -> str:
    """Interpreter for a fixture that asks for `warm_server`."""
    return sys.executable if server is None else str(server / "python")


def environment(server: Path | None) -> dict[str, str]:
    """Variables with which a shell script of a step ends in a fork of the server, and `python` is one."""
    return {} if server is None else {"WARM_PYTHON": python_of(server), "BASH_ENV": str(server / "starts.sh")}


@pytest.fixture(scope="session")
def warm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """A folder with the client as ``python``, and ``starts.sh``; None where a GPU, or another system, rules it out."""
    if sys.platform != "linux":
        yield None
        return
    folder = tmp_path_factory.mktemp("warm")
    place = folder / "socket"
    client = (HERE / "client.py").read_text(encoding="utf-8")
    (folder / "python").write_text(f"#!{sys.executable} -IS\nPLACE = {str(place)!r}\n{client}", encoding="utf-8")
    (folder / "python").chmod(0o755)
    (folder / "starts.sh").write_text(STARTS, encoding="utf-8")
    paths = os.pathsep.join(map(str, (HERE.parents[2] / "original_codes", HERE.parent, HERE.parents[1] / "numerics")))
    variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    variables |= {"DS_ACCELERATOR": "cpu", "MPLBACKEND": "agg"}
    with open(folder / "errors.txt", "wb") as errors:
        server = subprocess.Popen(
            [sys.executable, str(HERE / "server.py"), str(place)], env=variables, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
        )  # fmt: skip
    is_ready = any(line == "ready\n" for line in server.stdout)
    said = (folder / "errors.txt").read_text(encoding="utf-8")
    assert is_ready or "GPU" in said, said
    yield folder if is_ready else None
    server.stdin.close()
    server.wait()


@pytest.fixture(scope="module")
def warm_python(warm_server: Path | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(warm_server).items():
            patch.setenv(name, value)
        yield
