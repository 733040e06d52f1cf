"""Who a machine is: alone, the first of several, one that joins, or a node of a Slurm step."""

from __future__ import annotations

from typing import Any

import pytest
from configs import config_of

from zerokara.errors import UserError
from zerokara.training.nodes.machines import Machines, without_values

AGAIN = "bash 3_train_node1.sh --set nodes=2"


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JOB_ID", "NODEID", "STEP_NUM_NODES", "STEP_NUM_TASKS", "STEP_NODELIST", "LAUNCH_NODE_IPADDR"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)


def machines_of(join: str | None = None, host: str | None = None, **settings: Any) -> Machines:
    return Machines.of(config_of(**{"global_batch_size": 24, **settings}), join, host, AGAIN)


def test_alone() -> None:
    assert not machines_of().are_several and not machines_of(nodes=1).are_several
    assert not Machines.lone().are_several and Machines.lone().is_first


def test_the_first_prints_the_line_for_the_others() -> None:
    first = machines_of(nodes=4, min_nodes=2, global_batch_size=16, host="127.0.0.1:5000")
    assert first.are_several and first.is_first and (first.number, first.least) == (4, 2)
    assert first.command_to_join() == f"{AGAIN} --join 127.0.0.1:5000"
    with pytest.raises(UserError, match="is no address of this machine"):
        machines_of(nodes=2, host="192.0.2.7")


def test_one_that_joins() -> None:
    joining = machines_of(join="10.0.0.1")
    assert joining.are_several and not joining.is_first and str(joining.endpoint) == "10.0.0.1:29400"
    assert (machines_of(join="10.0.0.1", nodes=3).number, joining.least) == (3, 2)


def slurm(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    given = {"JOB_ID": "1042", "NODEID": "0", "STEP_NUM_NODES": "2", "STEP_NUM_TASKS": "2"}
    given |= {"STEP_NODELIST": "no-such-node[1-2]", "LAUNCH_NODE_IPADDR": "10.0.0.9", **values}
    for name, value in given.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("PATH", "")  # no scontrol


@pytest.mark.parametrize("index", ["0", "1"])
def test_in_a_slurm_step_nobody_is_told_anything(monkeypatch: pytest.MonkeyPatch, index: str) -> None:
    slurm(monkeypatch, NODEID=index)
    node = machines_of()
    assert node.are_several and node.is_told and node.is_first == (index == "0")
    assert (node.number, node.least, str(node.endpoint)) == (2, 2, "10.0.0.9:29442")


def test_a_slurm_step_of_one_node_is_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(monkeypatch, STEP_NUM_NODES="1", STEP_NUM_TASKS="1")
    assert not machines_of().are_several


def test_a_slurm_step_that_contradicts(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(monkeypatch)
    with pytest.raises(UserError, match="must be 2, the nodes of this Slurm step"):
        machines_of(nodes=3)
    slurm(monkeypatch, STEP_NUM_TASKS="16")
    with pytest.raises(UserError, match="ntasks-per-node=1"):
        machines_of()


def test_fewer_than_there_are() -> None:
    with pytest.raises(UserError, match="min_nodes"):
        config_of(nodes=2, min_nodes=3)


@pytest.mark.parametrize("joins", [["--join", "a:1"], ["--join=a:1"], ["--host", "b", "--join", "a:1"]])
def test_the_options_of_one_machine_are_not_handed_on(joins: list[str]) -> None:
    given = ["--set", "nodes=2", *joins, "--redo"]
    assert without_values(given, ("--join", "--host")) == ["--set", "nodes=2", "--redo"]
