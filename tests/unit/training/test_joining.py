"""Joining the processes of a run: memory that is freed, who does not answer, and who waits for whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from zerokara.training.planning import processors

HELD = """
import os, psutil, torch
from zerokara.training.processes import joining
for keeps in (True, False):
    if not os.fork():
        joining.keep_freed_memory(keeps)
        before = psutil.Process().memory_info().rss
        tensors = [torch.ones(2_000_000) for _ in range(15)]
        del tensors[:-1]
        print(psutil.Process().memory_info().rss - before, flush=True)
        os._exit(0)
    os.wait()
"""
SILENT = """
import os, sys, time
import torch.distributed
from zerokara.errors import RunError
from zerokara.training.processes import joining
joining.ANSWER_SECONDS = 2
rank = 0 if os.fork() else 1
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
if rank == 1:
    time.sleep(60)
try:
    joining.require_answers()
except RunError as error:
    print(error, flush=True)
    os._exit(3)
"""
SLOW = f"""
import datetime, os, sys, time
import torch, torch.distributed
from zerokara.errors import RunError
from zerokara.training.processes import joining
rank = 0 if os.fork() else 1
torch.distributed.init_process_group("gloo", init_method=f"file://{{sys.argv[1]}}", rank=rank, world_size=2)
joining.TIMEOUT = datetime.timedelta(seconds=0.5)
processes = joining.Processes(torch.device("cpu"), rank)
def work():
    time.sleep(2)
    return "7"
def fail():
    raise RunError("no disk")
for call in (work, fail, work):
    try:
        end = processes.from_one(call)
    except (RunError, SystemExit) as error:
        end = error
    os.write(1, f"{{rank}} {{end}}\\n".encode())  # whole lines: two processes write
    if call == fail:
        os.environ[{processors.PARENT_NAME!r}] = "0"  # the launcher is gone
if rank == 0:
    os.wait()
"""


def run(program: str, folder: Path) -> list[str]:
    command = [sys.executable, "-c", program, str(folder / "rendezvous")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.splitlines()


def test_freed_memory_is_kept_or_given_back(tmp_path: Path) -> None:
    """14 of 15 tensors of 8 MB are freed; in processes of their own, since the policy cannot be taken back."""
    kept, given_back = map(int, run(HELD, tmp_path))
    assert kept > 80e6 and given_back < 40e6


def test_a_process_that_does_not_answer_is_named(tmp_path: Path) -> None:
    program = [sys.executable, "-c", SILENT, str(tmp_path / "rendezvous")]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    message = next(line for line in process.stdout if "processes answered" in line)
    assert process.wait(timeout=30) == 3
    os.killpg(process.pid, signal.SIGKILL)  # the one that sleeps
    assert "2 processes" in message and "1" in message.partition("s: ")[2]


def test_the_others_wait_for_as_long_as_the_launcher_is_alive(tmp_path: Path) -> None:
    """The first one's work takes longer than a collective may; where it fails, or the launcher is gone, they end."""
    assert sorted(run(SLOW, tmp_path)) == ["0 7", "0 7", "0 no disk", "1 1", "1 1", "1 7"]
