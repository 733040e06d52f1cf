"""The rendezvous of a node's training processes, which no other machine and no other user can join."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import subprocess
import sys
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


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A rendezvous that is held, and given to this process as to one that was started."""
    with launching.rendezvous() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        joining.rendezvous.cache_clear()
        yield variables
    joining.rendezvous.cache_clear()


def listening() -> set[int]:
    return {each.laddr.port for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}


def test_processes_share_the_store_and_open_no_port(environment: dict[str, str]) -> None:
    before, one = listening(), joining.rendezvous()
    joining.rendezvous.cache_clear()
    other = joining.rendezvous()
    assert one and other and one is not other
    one.set("word", "said")
    assert other.get("word") == b"said"
    assert listening() == before


def test_the_rendezvous_outlives_the_process_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    joining.rendezvous.cache_clear()
    with launching.rendezvous() as environment:
        monkeypatch.setenv(supervision.RENDEZVOUS_NAME, environment[supervision.RENDEZVOUS_NAME])
        store = joining.rendezvous()
    assert store
    store.set("word", "said")
    assert store.get("word") == b"said"
    joining.rendezvous.cache_clear()


def test_a_process_without_a_rendezvous_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(supervision.RENDEZVOUS_NAME, raising=False)
    joining.rendezvous.cache_clear()
    assert joining.rendezvous() is None


def test_another_user_cannot_open_it(environment: dict[str, str]) -> None:
    path = environment[supervision.RENDEZVOUS_NAME]
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert subprocess.run(["cat", path], capture_output=True).returncode == 0
    if os.geteuid() == 0:  # who may become another user
        done = subprocess.run(["cat", path], capture_output=True, user=65534, group=65534, extra_groups=[])
        assert done.returncode == 1 and done.stderr


def _named_by(address: str) -> None:
    """Make `address` the host's name, for this process alone: gloo listens where the name leads."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUTS) == 0:
        socket.sethostname(address)


def test_gloo_listens_on_the_loopback_interface_whatever_the_hosts_name_is(root: Path) -> None:
    addresses = [
        each.address for every in psutil.net_if_addrs().values() for each in every if each.family == socket.AF_INET
    ]
    on_the_network = next((address for address in addresses if not address.startswith("127.")), "127.0.0.1")
    environment = {**os.environ, "PYTHONPATH": str(root / "original_codes")}
    environment.pop("GLOO_SOCKET_IFNAME", None)
    done = subprocess.run(
        [sys.executable, "-c", GLOO],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: _named_by(on_the_network),
    )
    assert done.stdout.split() == ["127.0.0.1"]


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_RAS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    ours = loopback.environment()
    assert ours["NCCL_SOCKET_IFNAME"] == "=" + ours["GLOO_SOCKET_IFNAME"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert loopback.environment() == {**ours, "GLOO_SOCKET_IFNAME": "eth7"}
