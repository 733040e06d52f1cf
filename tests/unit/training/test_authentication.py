"""Another user who connects in the place of a training process is detected before anything is computed."""

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

from zerokara.training import launching

PROCESS = """
import sys, torch.distributed
from zerokara.training.processes import joining
joining.ANSWER_SECONDS = 3
while line := sys.stdin.readline():
    if line == "another\\n":
        joining.hmac.digest = lambda *_: bytes(32)
    if torch.distributed.is_initialized():
        torch.distributed.new_group()
    else:
        joining.init_process_group(torch.device("cpu"))
    joining.secure_groups()
    print("proved", flush=True)
"""
"""Makes a group, and proves who it is, for each line that it reads."""


@pytest.fixture
def processes(root: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that have loaded torch and wait for a line before they connect."""
    with launching.rendezvous() as told:
        started = []
        for rank in range(2):
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
            started.append(
                subprocess.Popen(
                    [sys.executable, "-c", PROCESS],
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


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline()


def new_port(process: subprocess.Popen[str], known: set[int]) -> int:
    """Where gloo listens for its next group, once it does."""
    while process.poll() is None:
        found = psutil.Process(process.pid).net_connections("tcp")
        for port in {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN} - known:
            known.add(port)
            return port
        time.sleep(0.02)
    raise AssertionError(process.communicate()[1])


def test_processes_of_one_run_prove_it_in_each_of_their_groups(processes: list[subprocess.Popen[str]]) -> None:
    for _ in range(2):
        for process in processes:
            begin(process)
        assert [said(process) for process in processes] == ["proved\n", "proved\n"]


def test_who_has_another_key_is_found_out(processes: list[subprocess.Popen[str]]) -> None:
    for process, key in zip(processes, ("", "another"), strict=True):
        begin(process, key)
    _, err = processes[0].communicate(timeout=60)
    assert processes[0].returncode and "RunError: process 1 " in err


def test_a_stranger_in_the_place_of_one_is_found_out(processes: list[subprocess.Popen[str]]) -> None:
    """Of two processes the one with the lower port waits for the other (gloo/transport/tcp/pair.cc): chance."""
    first, second = processes
    ports: set[int] = set()
    strangers: list[socket.socket] = []
    taken: list[socket.socket] = []
    for _ in range(20):
        begin(first)
        place = ("127.0.0.1", new_port(first, ports))
        strangers = [socket.create_connection(place) for _ in range(4)]
        for number, stranger in enumerate(strangers):
            stranger.sendall(struct.pack("<q", number))  # gloo/transport/tcp/listener.cc: for which peer this is meant
        begin(second)
        assert first.stdout
        while not taken and not select.select([first.stdout], [], [], 0)[0]:
            heard, _, _ = select.select(strangers, [], [], 0.02)
            # What comes is meant for the second process; of the others gloo closes the connection.
            taken = [stranger for stranger in heard if stranger.recv(4096)]
            strangers = [stranger for stranger in strangers if stranger not in heard or stranger in taken]
        if taken:
            break
        assert [said(first), said(second)] == ["proved\n", "proved\n"]
    assert taken, "gloo turned every stranger away by itself"
    _, err = first.communicate(timeout=60)
    for stranger in strangers:
        stranger.close()
    assert first.returncode, err  # 1, or -6 where gloo's threads are still at it when Python leaves
    assert "RunError: " in err and "another program" in err
