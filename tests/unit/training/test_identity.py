"""Another user who connects in the place of a training process is found out before anything is computed."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from zerokara.training.processes import meeting

PROCESS = """
import sys, torch.distributed
from zerokara.training.processes import identity, meeting
rank = int(sys.argv[1])
if sys.stdin.readline() == "another\\n":
    meeting.key = lambda: b"another"
torch.distributed.init_process_group("gloo", init_method=meeting.init_method(), rank=rank, world_size=2)
identity.prove(within_seconds=float(sys.argv[2]))
second = torch.distributed.new_group()
identity.prove(within_seconds=float(sys.argv[2]))
print("proved")
"""


@pytest.fixture
def processes(root: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that have loaded torch and wait for a line before they connect."""
    with meeting.place() as told:
        started = []
        for rank in range(2):
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
            started.append(
                subprocess.Popen(
                    [sys.executable, "-c", PROCESS, str(rank), "3"],
                    env={**os.environ, **told, **place, "PYTHONPATH": str(root / "original_codes")},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield started
        for process in started:
            process.kill()
            process.communicate()


def begin(process: subprocess.Popen[str], key: str = "") -> None:
    assert process.stdin
    process.stdin.write(f"{key}\n")
    process.stdin.flush()


def port(process: subprocess.Popen[str]) -> int:
    """Where gloo listens, once it does."""
    while process.poll() is None:
        for each in psutil.Process(process.pid).net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN:
                return each.laddr.port
        time.sleep(0.05)
    raise AssertionError(process.stderr.read() if process.stderr else "")


def test_processes_of_one_run_prove_it_in_each_of_their_groups(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        begin(process)
    said = [process.communicate(timeout=60) for process in processes]
    assert [out for out, _ in said] == ["proved\n", "proved\n"], said


def test_who_has_another_key_is_found_out(processes: list[subprocess.Popen[str]]) -> None:
    for process, key in zip(processes, ("", "another"), strict=True):
        begin(process, key)
    _, err = processes[0].communicate(timeout=60)
    assert processes[0].returncode == 1 and "RunError: process 1 did not prove that it is of this run" in err


def test_a_stranger_in_the_place_of_one_is_found_out(processes: list[subprocess.Popen[str]]) -> None:
    first, second = processes
    begin(first)
    strangers = [socket.create_connection(("127.0.0.1", port(first))) for _ in range(4)]
    for number, stranger in enumerate(strangers):
        stranger.sendall(
            struct.pack("<q", number)
        )  # gloo/transport/tcp/listener.cc: which connection this is meant to be
    begin(second)
    # It was taken for the second process where something comes that is meant for that one.
    taken = []
    while not taken and first.poll() is None:
        heard, _, _ = select.select(strangers, [], [], 0.1)
        taken = [stranger for stranger in heard if stranger.recv(4096)]
        strangers = [stranger for stranger in strangers if stranger not in heard or stranger in taken]
    assert taken, "gloo has turned all strangers away by itself"
    taken[0].sendall(bytes(4096))
    out, err = first.communicate(timeout=60)
    for stranger in strangers:
        stranger.close()
    assert out == "" and first.returncode == 1 and "RunError: " in err and "may have connected in its place" in err
