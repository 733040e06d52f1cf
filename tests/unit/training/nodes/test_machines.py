"""Role of a machine: alone, the first of several, one that joins, or a node of a Slurm step; and its endpoint."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from configs import config_of

from zerokara.errors import UserError
from zerokara.training.nodes import machines, meeting
from zerokara.training.nodes.machines import Endpoint, Machines
from zerokara.training.nodes.meeting import meet

AGAIN = "bash 3_train_node1.sh --set nodes=2"


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JOB_ID", "NODEID", "STEP_NUM_NODES", "STEP_NUM_TASKS", "STEP_NODELIST", "LAUNCH_NODE_IPADDR"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)


def machines_of(join: str | None = None, host: str | None = None, **settings: Any) -> Machines:
    return Machines.of(config_of(**{"global_batch_size": 24, **settings}), join, host, AGAIN)


def test_the_first_prints_the_line_for_the_others() -> None:
    typed = f"{AGAIN} --host 127.0.0.1:5000 --redo"
    first = Machines.of(config_of(nodes=4, min_nodes=2, global_batch_size=16), None, "127.0.0.1:5000", typed)
    assert first.is_first and (first.number, first.min_number) == (4, 2)
    assert first.command_to_join == f"{AGAIN} --redo --join 127.0.0.1:5000"


def test_the_first_listens_at_an_address_of_its_own_and_a_free_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for host in ("192.0.2.7", f"127.0.0.1:{taken.getsockname()[1]}"):
            with pytest.raises(UserError, match=r"--host.*127\.0\.0\.1"), meet(machines_of(nodes=2, host=host)):
                pass


def test_a_first_machine_that_is_not_there_is_looked_for_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "CONNECT_SECONDS", 1.0)
    before = time.process_time()
    with pytest.raises(UserError, match=r"--join.*127\.0\.0\.1:1:.*firewall"), meet(machines_of(join="127.0.0.1:1")):
        pass
    assert time.process_time() - before < 0.5


def test_alone_or_one_that_joins() -> None:
    assert machines_of() == machines_of(nodes=1) == Machines() and Machines().is_first and Machines().number == 1
    with pytest.raises(UserError, match="min_nodes"):
        config_of(nodes=2, min_nodes=3)
    joining = machines_of(join="10.0.0.1")
    assert not joining.is_first and str(joining.endpoint) == "10.0.0.1:29400"
    assert (machines_of(join="10.0.0.1", nodes=3).number, joining.min_number) == (3, 2)


def slurm(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    given = {"JOB_ID": "1042", "NODEID": "0", "STEP_NUM_NODES": "2", "STEP_NUM_TASKS": "2"}
    given |= {"STEP_NODELIST": "node[01-03,7],login", "LAUNCH_NODE_IPADDR": "10.0.0.9", **values}
    for name, value in given.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


@pytest.mark.parametrize("index", ["0", "1"])
@pytest.mark.parametrize(("found", "address"), [("10.0.0.1", "10.0.0.1"), ("127.0.1.1", "10.0.0.9")])
def test_in_a_slurm_step_nobody_is_told_anything(
    monkeypatch: pytest.MonkeyPatch, index: str, found: str, address: str
) -> None:
    """They meet at the first node; where its name leads nowhere, at the one where srun was called."""
    slurm(monkeypatch, NODEID=index)
    known = {"node01": [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, 29442))]}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: known[host])
    node = machines_of()
    assert not node.command_to_join and node.is_first == (index == "0")
    assert (node.number, node.min_number, str(node.endpoint)) == (2, 2, f"{address}:29442")


def test_a_slurm_step_of_one_node_and_one_that_contradicts(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(monkeypatch, STEP_NUM_NODES="1", STEP_NUM_TASKS="1")
    assert machines_of() == Machines()
    slurm(monkeypatch)
    with pytest.raises(UserError, match="must be 2, the nodes of this Slurm step"):
        machines_of(nodes=3)
    slurm(monkeypatch, STEP_NUM_TASKS="16")
    with pytest.raises(UserError, match="ntasks-per-node=1"):
        machines_of()


@pytest.mark.parametrize(
    ("text", "host", "port", "written"),
    [
        ("10.0.0.1", "10.0.0.1", 29400, "10.0.0.1:29400"),
        ("10.0.0.1:5000", "10.0.0.1", 5000, "10.0.0.1:5000"),
        ("node-1:5000", "node-1", 5000, "node-1:5000"),
        ("[fe80::1]:5000", "fe80::1", 5000, "[fe80::1]:5000"),
        ("[fe80::1]", "fe80::1", 29400, "[fe80::1]:29400"),
    ],
)
def test_an_endpoint_is_read_as_it_is_written(text: str, host: str, port: int, written: str) -> None:
    found = Endpoint.parse(text, "--join")
    assert (found.host, found.port, str(found)) == (host, port, written)
    assert Endpoint.parse(str(found), "--join") == found


@pytest.mark.parametrize("text", ["", ":5000", "node:port", "node:0", "node:70000"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--join.*10\.0\.0\.1:29400"):
        Endpoint.parse(text, "--join")


def test_the_address_is_that_of_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machines.address_towards("127.0.0.1") == "127.0.0.1"
    assert "127.0.0.1" in machines.own_addresses()

    def unreachable(host: str) -> str:
        raise OSError("Network is unreachable")

    for name in ("gethostname", "getfqdn", "gethostbyname"):  # a name that does not resolve is never asked for
        monkeypatch.setattr(socket, name, unreachable)
    assert "127.0.0.1" in machines.own_addresses()
    monkeypatch.setattr(machines, "address_towards", unreachable)
    with pytest.raises(UserError, match=r"no default route.*127\.0\.0\.1.*--host"):
        machines_of(nodes=2)
