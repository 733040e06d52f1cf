"""Machines that train together: the role of each, with its endpoint; faults that keep them from it; who is lost."""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from configs import config_of, fault_of
from tiny import ROOT
from torch.distributed import HashStore, PrefixStore

from zerokara.base.errors import RunError, UserError
from zerokara.training.nodes import agent, machines, rendezvous
from zerokara.training.nodes.agent import Heartbeat
from zerokara.training.nodes.machines import Endpoint, Machines
from zerokara.training.nodes.rendezvous import LostFirstMachine, join_rendezvous
from zerokara.training.planning.run_plan import RunPlan

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
            with (
                pytest.raises(UserError, match=r"--host.*127\.0\.0\.1"),
                join_rendezvous(machines_of(nodes=2, host=host)),
            ):
                pass


def test_a_first_machine_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "CONNECT_SECONDS", 1.0)
    with (
        pytest.raises(UserError, match=r"--join.*127\.0\.0\.1:1:.*firewall"),
        join_rendezvous(machines_of(join="127.0.0.1:1")),
    ):
        pass


def test_alone_or_one_that_joins() -> None:
    assert machines_of() == machines_of(nodes=1) == Machines() and Machines().is_first and Machines().number == 1
    joining = machines_of(join="10.0.0.1")
    assert not joining.is_first and str(joining.endpoint) == "10.0.0.1:29400"
    assert (machines_of(join="10.0.0.1", nodes=3).number, joining.min_number) == (3, 2)


@pytest.mark.parametrize("nodes", [2, "auto"])
def test_a_run_does_not_start_on_fewer_machines_than_are_enough(nodes: int | str) -> None:
    with pytest.raises(UserError, match=rf"min_nodes.*must be at most {2 if nodes == 2 else 1}, the machines of"):
        machines_of(nodes=nodes, min_nodes=3)


def slurm(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    given = {"JOB_ID": "1042", "NODEID": "0", "STEP_NUM_NODES": "2", "STEP_NUM_TASKS": "2"}
    given |= {"STEP_NODELIST": "node[01-03,7],login", "LAUNCH_NODE_IPADDR": "10.0.0.9", **values}
    for name, value in given.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


@pytest.mark.parametrize("index", ["0", "1"])
@pytest.mark.parametrize(("found", "address"), [("10.0.0.1", "10.0.0.1"), ("127.0.1.1", "10.0.0.9")])
def test_in_a_slurm_step_nobody_is_told(monkeypatch: pytest.MonkeyPatch, index: str, found: str, address: str) -> None:
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
        ("node-1:5000", "node-1", 5000, "node-1:5000"),
        ("[fe80::1]", "fe80::1", 29400, "[fe80::1]:29400"),
    ],
)
def test_an_endpoint_is_read_as_it_is_written(text: str, host: str, port: int, written: str) -> None:
    found = Endpoint.parse(text, "--join")
    assert (found.host, found.port, str(found)) == (host, port, written)
    assert Endpoint.parse(str(found), "--join") == found


@pytest.mark.parametrize("text", ["", ":5000", "node:port", "node:0"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--join.*10\.0\.0\.1:29400"):
        Endpoint.parse(text, "--join")


def test_where_there_is_no_route_the_address_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(host: str) -> str:
        raise OSError("Network is unreachable")

    assert machines.address_towards("127.0.0.1") == "127.0.0.1"
    monkeypatch.setattr(machines, "address_towards", unreachable)
    with pytest.raises(UserError, match=r"no default route.*127\.0\.0\.1.*--host"):
        machines_of(nodes=2)


GOOD = {
    "host": "alpha", "address": "10.0.0.1", "code": "c0de", "packages": {"torch": "2.13.0"},
    "settings": {"lr": 0.01, "zero_stage": 1}, "tokenizer": "t", "data": {"train": "d", "train.bin": "a"},
    "processes": 8, "device": "cuda", "devices": "GPU, 8 × H200", "precision": "bf16", "free_bytes": 10**12,
    "clock": [1e9, 1e9 + 0.2],
}  # fmt: skip
BETA = {**GOOD, "host": "beta", "address": "10.0.0.2"}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("code", "0ther", ("another zerokara", "commit")),
        ("settings", {"lr": 0.01, "zero_stage": 2}, ("zero_stage 1, here 2", "config.yaml")),
        ("data", {"train": "x", "train.bin": "b"}, ("other token files", "train d, here x, train.bin a, here b")),
    ],
)
def test_a_difference_is_named_with_machine_and_remedy(key: str, value: Any, words: tuple[str, ...]) -> None:
    assert not list(rendezvous.faults([GOOD, BETA]))
    (fault,) = rendezvous.faults([GOOD, {**BETA, key: value}])
    assert fault.where == "machine 1, beta (10.0.0.2)"
    assert all(word in str(fault) for word in words), str(fault)


def test_every_fault_is_named_at_once() -> None:
    broken = {**BETA, "precision": "fp32", "tokenizer": "x"}
    own = {key: GOOD[key] for key in ("host", "free_bytes", "clock")}
    own |= {"address": "10.0.0.3", "faults": ["config.yaml:3: -1: lr must be positive"]}
    found = list(rendezvous.faults([GOOD, broken, own]))
    assert len(found) == 3
    assert "10.0.0.3" in found[2].where and "lr must be positive" in found[2].rule
    assert len(list(rendezvous.faults([own, GOOD, BETA]))) == 1


@pytest.mark.parametrize(
    ("seconds", "waited", "words"),
    [(-6.0, 0.1, "5.9 s behind that of alpha"), (6.0, 0.1, "5.8 s ahead of"), (6.0, 2.0, "ahead of"), (4.0, 0.1, "")],
)
def test_clocks(seconds: float, waited: float, words: str) -> None:
    """A busy machine sees the moment between two looks that lie far apart, and is not accused."""
    beta = {**BETA, "clock": [1e9 + seconds, 1e9 + seconds + waited]}
    found = list(map(str, rendezvous.faults([GOOD, beta])))
    assert len(found) == bool(words) and words in "".join(found)
    for first, other in (([0.0, 30.0], [25.0, 31.0]), ([29.0, 30.0], [0.0, 31.0])):
        assert not list(rendezvous.faults([{**GOOD, "clock": first}, {**BETA, "clock": other}]))


NOTHING = lambda: None  # noqa: E731


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr(agent, "LOST_SECONDS", 0.5)


def test_the_living_are_not_lost_and_one_that_falls_silent_or_never_came_is_named(quick: None) -> None:
    store = HashStore()
    one, other = Heartbeat(store, 0, {1: "beta"}, NOTHING), Heartbeat(store, 1, {0: "alpha"}, NOTHING)
    alone = Heartbeat(HashStore(), 0, {1: "gamma"}, NOTHING)
    for _ in range(10):
        time.sleep(0.1)
        assert not one.lost() and not other.lost()
    assert "gamma" in str(alone.lost())
    other.stop()
    time.sleep(0.8)
    assert "beta" in str(one.lost()) and not isinstance(one.lost(), LostFirstMachine)
    one.stop()
    alone.stop()


def test_a_request_that_hangs_is_a_lost_first_machine(quick: None) -> None:
    hangs, calls = threading.Event(), []

    def on_beat() -> None:
        calls.append(1)
        if len(calls) > 3:
            hangs.wait(10)

    store = HashStore()
    one, other = Heartbeat(store, 1, {0: "alpha"}, on_beat), Heartbeat(store, 0, {1: "beta"}, NOTHING)
    time.sleep(1.0)
    assert isinstance(one.lost(), LostFirstMachine)
    hangs.set()
    one.stop()
    other.stop()


def first_of(number: int, command_to_join: str = "") -> Machines:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return Machines(number, number, Endpoint("127.0.0.1", port), command_to_join=command_to_join)


def test_a_task_of_slurm_that_never_comes_and_a_machine_that_leaves_end_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "CONNECT_SECONDS", 0.3)
    monkeypatch.setattr(rendezvous, "LEAVE_SECONDS", 0.3)
    with pytest.raises(RunError, match="1 machine of the Slurm step did not come"), join_rendezvous(first_of(2)):
        pass
    first = first_of(3, "the line for the others")
    assert first.endpoint is not None
    endpoint = first.endpoint

    def come_and_leave() -> None:
        store = PrefixStore("zerokara", rendezvous._connected(endpoint))
        store.add("arrived", 1)
        store.add("departed", 1)

    monkeypatch.setattr(rendezvous, "CONNECT_SECONDS", 60.0)
    other = threading.Thread(target=come_and_leave)
    other.start()
    with pytest.raises(RunError, match="a machine that had arrived has left"), join_rendezvous(first):
        pass
    other.join()


def test_machines_whose_clocks_have_drifted_apart_do_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch drops one whose heartbeat looks old, and goes on with fewer than are enough."""
    info = mock.Mock(store=HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(agent.DynamicRendezvousHandler, "next_rendezvous", lambda _: info)
    handler = agent._Handler.__new__(agent._Handler)
    handler.joined = mock.Mock(min_count=2)
    with pytest.raises(RunError, match="clocks"):
        handler.next_rendezvous()


def test_a_job_that_returns_to_the_queue_takes_no_redo() -> None:
    command = ["bash", "cluster/3_train.sbatch", "--config", "big.yaml", "--redo"]
    found = subprocess.run(command, cwd=ROOT, env={**os.environ, "SLURM_SUBMIT_DIR": str(ROOT)}, capture_output=True)
    assert found.returncode == 2 and b"would start over each time" in found.stderr


@pytest.mark.parametrize(("option", "nodes"), [("join", 1), ("host", 1), ("host", "auto")])
def test_one_machine_joins_none_and_is_joined_by_none(option: str, nodes: int | str) -> None:
    fault = fault_of(lambda: machines_of(**{option: "10.0.0.1", "nodes": nodes}))
    assert fault.key == "nodes" and f"--{option}" in fault.rule


def test_machines_take_the_highest_stage_that_one_of_them_needs(
    plan_of: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has chosen by its own memory; with different ones they would wait for each other for ever."""
    plan = plan_of("nodes=2", "zero_stage=auto", "optimizer=adamw").on_processes(2, 2).with_settings(precision="fp32")
    meeting = mock.Mock(count=2, address="here", clock=(0.0, 0.0))
    meeting.gather = lambda _, own, *_more: [own, {**own, "stage": 3}]
    found = rendezvous.check_consistent(meeting, plan.with_settings(zero_stage=1))
    assert found.resolved.stage == 3
    meeting.gather = lambda _, own, *_more: [own, {"host": "b", "address": "b", "free_bytes": 0, "faults": ["no room"]}]
    with pytest.raises(UserError, match="no room"):
        rendezvous.check_consistent(meeting, plan)
