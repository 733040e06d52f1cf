"""The command as a person runs it, with two processes: killed whole, killed in part, asked to stop; and resumed."""

import contextlib
import fcntl
import os
import random
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import warm
from configs import typed
from faults.running import BY_COMMAND, assert_equal, wait_for, whole_checkpoints
from tiny import ROOT, Trained

from zerokara import checkpoint

PIPE_BYTES = 4096


class Command:
    """``bash 3_train_node1.sh`` at work.

    It cannot run ahead of the test that reads its output: the pipe holds the lines of some 30 steps at most, and a
    process that finds it full waits. So the run of 120 steps cannot end before three kills have come, however busy the
    machine is.
    """

    def __init__(self, config: str, run_dir: Path, environment: dict[str, str]):
        settings = typed(**BY_COMMAND, num_processes=2, output_model_dir=run_dir)
        command = ["bash", str(ROOT / "3_train_node1.sh"), "--config", config, *settings]
        self._run_dir = run_dir
        self.process = subprocess.Popen(
            command, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **environment},
        )  # fmt: skip
        self._pipe = self.process.stdout
        fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.log = ""

    def wait_for_steps(self, number: int) -> None:
        """Read until so many steps were made."""
        seen = 0
        while seen < number:
            line = self._pipe.readline().decode()  # byte by byte, and so no further
            assert line, self.log
            self.log += line
            seen += line.startswith("step ") and "/120  loss" in line

    @property
    def first_step(self) -> int:
        match = re.search(r"^step (\d+)/120 ", self.log, re.MULTILINE)
        assert match, self.log
        return int(match[1])

    def trainer(self, rank: int) -> psutil.Process:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return sorted(children, key=lambda each: (each.create_time(), each.pid))[rank]

    def kill_all(self) -> None:
        command = psutil.Process(self.process.pid)
        everyone = [command, *command.children(recursive=True)]
        assert len(everyone) == 3, everyone  # the command, two training processes
        for one in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(everyone[1:])

    def end(self) -> int:
        """Read and wait to the end, of every process; the exit code."""
        self.log += self._pipe.readall().decode()
        code = self.process.wait(timeout=60)
        wait_for(lambda: not self._left_behind())
        return code

    def _left_behind(self) -> list[psutil.Process]:
        everyone = psutil.process_iter(["cmdline"])
        return [one for one in everyone if f"output_model_dir={self._run_dir}" in (one.info["cmdline"] or ())]


@pytest.mark.slow
def test_killed_and_stopped_and_resumed(
    tiny_data: dict[str, str], in_two_processes: dict[str, Trained], warm_server: Path | None, tmp_path: Path
) -> None:  # fmt: skip
    """Real starts are killed; one that is asked to stop, and the last, are forked as the unbroken run is."""
    config, run_dir, chance = tiny_data["config"], tmp_path / "run", random.Random(3)
    forked = warm.environment(warm_server)
    for whom in ("all", "rank 0", "asked"):
        newest = checkpoint.all_steps(run_dir)[-1] if whom != "all" else 0
        command = Command(config, run_dir, forked if whom == "asked" else {})
        # The second save waits for the first: after six steps, a further checkpoint stands.
        command.wait_for_steps(chance.randint(6, 9))
        if whom == "all":
            command.kill_all()
        elif whom == "asked":
            command.process.send_signal(signal.SIGTERM)
        else:
            command.trainer(0).kill()
        assert command.end() == {"all": -signal.SIGKILL, "asked": 130}.get(whom, 1), command.log
        assert command.first_step == newest + 1
        assert ("stopped by SIGTERM" in command.log) == (whom == "asked")
        assert ("was killed (SIGKILL)" in command.log) == (whom == "rank 0")
        assert whole_checkpoints(run_dir)[-1] < 120
    newest = checkpoint.all_steps(run_dir)[-1]
    last = Command(config, run_dir, forked)
    assert last.end() == 0, last.log
    assert last.first_step == newest + 1
    # What two processes have is added up alike in either order: bit for bit here, too.
    assert_equal(run_dir, in_two_processes["by_command"])
    assert len(Trained(run_dir).losses) == 120
