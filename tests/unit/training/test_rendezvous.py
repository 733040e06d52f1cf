"""The rendezvous of a node's training processes, which no other machine and no other user can join.

Another user who connects in the place of a training process is detected before anything is computed.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from zerokara.model import loopback
from zerokara.training import launching
from zerokara.training.processes import joining, supervision

GLOO = """
import os, psutil, torch.distributed
from zerokara.model import loopback
os.environ.update(loopback.environment())
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
print(*{each.laddr.ip for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN})
"""
CLONE_NEWUTS = 0x04000000
"""Source: linux/sched.h."""


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
            environment = {**os.environ, **told, **place, "PYTHONPATH": str(root / "original_codes")}
            streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            command = [sys.executable, "-c", PROCESS]
            started.append(subprocess.Popen(command, env=environment, text=True, **streams))
        yield started
        for process in started:
            process.kill()
            process.communicate()


def begin(process: subprocess.Popen[str], key: str = "") -> None:
    print(key, file=process.stdin, flush=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline()


def new_port(process: subprocess.Popen[str], known: set[int]) -> int:
    """Wait for the port at which gloo listens for its next group."""
    while process.poll() is None:
        found = psutil.Process(process.pid).net_connections("tcp")
        for port in {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN} - known:
            known.add(port)
            return port
        time.sleep(0.02)
    raise AssertionError(process.communicate()[1])


def test_processes_of_one_run_prove_it_in_each_group_and_who_has_another_key_is_found_out(
    processes: list[subprocess.Popen[str]],
) -> None:
    for key in ("", "", "another"):
        begin(processes[0])
        begin(processes[1], key)
        if not key:
            assert [said(process) for process in processes] == ["proved\n", "proved\n"]
    _, err = processes[0].communicate(timeout=60)
    assert processes[0].returncode and "RunError: process 1 " in err


def test_a_stranger_in_the_place_of_one_is_found_out(processes: list[subprocess.Popen[str]]) -> None:
    """The process with the lower port waits for the other (gloo/transport/tcp/pair.cc): chance."""
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


def listening() -> set[int]:
    return {each.laddr.port for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}


def test_processes_share_the_store_which_outlives_the_one_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And opens no port. A process without a rendezvous is left to torch."""
    before, stores = listening(), []
    for _ in range(2):
        joining.rendezvous.cache_clear()
        monkeypatch.delenv(supervision.RENDEZVOUS_NAME, raising=False)
        assert joining.rendezvous() is None
    with launching.rendezvous() as environment:
        monkeypatch.setenv(supervision.RENDEZVOUS_NAME, environment[supervision.RENDEZVOUS_NAME])
        for _ in range(2):
            joining.rendezvous.cache_clear()
            stores.append(joining.rendezvous())
    joining.rendezvous.cache_clear()
    one, other = stores
    one.set("word", "said")
    assert other.get("word") == b"said" and one is not other and listening() == before


def test_another_user_cannot_open_it() -> None:
    with launching.rendezvous() as environment:
        path = environment[supervision.RENDEZVOUS_NAME]
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert subprocess.run(["cat", path], capture_output=True).returncode == 0
        if os.geteuid() == 0:  # who may become another user
            done = subprocess.run(["cat", path], capture_output=True, user=65534, group=65534, extra_groups=[])
            assert done.returncode == 1 and done.stderr


def test_gloo_listens_on_the_loopback_interface_whatever_the_hosts_name_is(root: Path) -> None:
    addresses = [
        each.address for every in psutil.net_if_addrs().values() for each in every if each.family == socket.AF_INET
    ]
    on_the_network = next((address for address in addresses if not address.startswith("127.")), "127.0.0.1")
    environment = {**os.environ, "PYTHONPATH": str(root / "original_codes")}
    environment.pop("GLOO_SOCKET_IFNAME", None)

    def rename_host() -> None:
        """For this process alone: gloo listens where the host's name leads."""
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS) == 0:
            socket.sethostname(on_the_network)

    command = [sys.executable, "-c", GLOO]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, preexec_fn=rename_host)
    assert done.stdout.split() == [b"127.0.0.1"]


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_RAS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    ours = loopback.environment()
    assert ours["NCCL_SOCKET_IFNAME"] == "=" + ours["GLOO_SOCKET_IFNAME"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert loopback.environment() == {**ours, "GLOO_SOCKET_IFNAME": "eth7"}
