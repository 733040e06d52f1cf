"""The machines of a run, as the command that was typed on one of them sees them: from their meeting to their end.

One machine is the first: it was given ``nodes`` above 1, and prints the line for the others. The others were given
``--join``. In a Slurm step with several nodes nobody is told anything: Slurm's variables say who is who.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from zerokara.config.machine import MachineSettings
from zerokara.errors import Fault, RunError, UserError
from zerokara.progress import plural
from zerokara.training.nodes.addresses import DEFAULT_PORT, Endpoint, check_own, interface_of, own_address
from zerokara.training.planning.run_plan import RunPlan

if TYPE_CHECKING:  # it imports torch, which nothing waits for that is checked before the machines meet
    from zerokara.training.nodes.meeting import Meeting

JOIN, HOST = "--join", "--host"
_SLURM_PORTS = 1000
"""Jobs of one machine take ports of their own, by their numbers."""


@dataclass
class Machines:
    """The machines that train together; with a number of 1 there is nothing to do for any method."""

    number: int
    """How many there will be."""
    least: int
    """How many are enough."""
    endpoint: Endpoint | None = None
    """Where they meet; None where they are one."""
    is_first: bool = True
    """Whether this machine holds the meeting."""
    is_told: bool = False
    """Whether the others know already where that is."""
    again: str = ""
    """The command that was typed here, without `JOIN` and `HOST`."""
    meeting: Meeting = field(init=False)
    """Of all, as long as the block of `met` lasts."""
    _has_met: bool = field(init=False, default=False)
    _count: int = field(init=False, default=0)
    """How many have come; 0 for one that came too late."""
    _met_at: float = field(init=False, default=0.0)
    """This machine's clock when all were there."""

    @classmethod
    def of(cls, config: MachineSettings, join: str | None, host: str | None, again: str) -> Machines:
        """Find out who this machine is.

        Raises:
            UserError: the options or Slurm's variables contradict the settings.
        """
        slurm = _Slurm.step()
        if join is not None:
            return cls(_number(config, 2), _least(config, 2), Endpoint.parse(join, JOIN), is_first=False, again=again)
        if slurm is not None and host is None:
            number = _number(config, slurm.num_nodes)
            if number != slurm.num_nodes:
                rule = f"must be {slurm.num_nodes}, the nodes of this Slurm step, or auto"
                raise UserError(config.fault("nodes", rule, "set nodes: auto, or change --nodes of srun"))
            return cls(number, _least(config, number), slurm.endpoint(), slurm.index == 0, is_told=True, again=again)
        number = _number(config, 1)
        if number == 1:
            return cls(1, 1, again=again)
        endpoint = Endpoint.parse(host, HOST) if host else Endpoint(own_address())
        check_own(endpoint.host)
        return cls(number, _least(config, number), endpoint, again=again)

    @classmethod
    def lone(cls) -> Machines:
        """This machine alone."""
        return cls(1, 1)

    def __post_init__(self) -> None:
        if self.are_several:  # torch warns of each machine whose address has no name, which is nothing to act on
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    @property
    def are_several(self) -> bool:
        """Whether there is more than one."""
        return self.number > 1

    def command_to_join(self) -> str:
        """What is typed on each of the others."""
        return f"{self.again} {JOIN} {self.endpoint}"

    @contextlib.contextmanager
    def met(self) -> Iterator[Meeting]:
        """Meet the others, as long as the block lasts; say how they find this machine, and who comes.

        Raises:
            UserError: the port is taken, or the first machine is not there.
            RunError: too few come.
        """
        from zerokara.training.nodes import meeting

        assert self.endpoint is not None
        opened = meeting.held(self.endpoint) if self.is_first else meeting.joined(self.endpoint)
        if self.is_first:
            print(f"waiting for {plural(self.number - 1, 'more machine')} at {self.endpoint}", flush=True)
            if not self.is_told:
                print(f"on each, with the same settings and data: {self.command_to_join()}", flush=True)
        else:
            print(f"looking for the first machine at {self.endpoint}", flush=True)
        self._has_met = True
        with opened as self.meeting:
            self._count = self.meeting.wait_for_all(self.number, self.least)
            self._met_at = time.time()
            yield self.meeting

    def report_faults(self, faults: Sequence[Fault]) -> None:
        """Tell the others what keeps this machine from taking part, so that all say it; not for the first one."""
        if self.is_first or self._has_met:
            return
        from zerokara.training.nodes import health

        with contextlib.suppress(UserError, RunError), self.met() as met:
            health.exchange(met, self._count, health.faulty_report(met.address, self._met_at, faults))

    def agreed(self, plan: RunPlan, devices: str, device: str) -> RunPlan:
        """Compare what the machines have; show it, and return the plan for those that came.

        Raises:
            UserError: they must not start together; has every fault of all.
        """
        from zerokara.training.nodes import health

        if not self._count:
            raise RunError("the run has started without this machine; it may join the next start")
        if self._count != plan.nodes:
            plan = plan.on_processes(self._count * plan.processes_per_node, self._count)
        own = health.report_of(plan, self.meeting.address, self._met_at, device, devices)
        reports = health.exchange(self.meeting, self._count, own)
        print(f"{self._count} machines are here:", flush=True)
        for line in health.table(reports):
            print(f"  {line}")
        if faults := list(health.faults(reports)):
            raise UserError(faults)
        return plan

    def claims(self, run_dir: Path) -> bool:
        """Whether this machine makes the run folder: the first of those that see the same one, which is found out here.

        Each leaves a file beside the folder, and looks for those of the others.
        """
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        attempt = str(self.meeting.hear_from_first("attempt"))

        def probe(index: int) -> Path:
            return run_dir.with_name(f".{run_dir.name}.{attempt}-{index}.partial")

        probe(self.meeting.index).write_bytes(b"")
        self.wait_until_all("probed")
        sees = [index for index in range(self._count) if probe(index).exists()]
        self.wait_until_all("seen")
        probe(self.meeting.index).unlink(missing_ok=True)
        if sees[0] != self.meeting.index:
            print(f"the run folder {run_dir} is shared with machine {sees[0]}", flush=True)
        return sees[0] == self.meeting.index

    def wait_until_all(self, what: str) -> None:
        """Wait until all machines are so far.

        Raises:
            RunError: one did not come so far within a minute; it has printed why.
        """
        self.meeting.tell(what, True)
        silent = [index for index in range(self._count) if self.meeting.hear(what, index) is None]
        if silent:
            raise RunError(f"machine {silent[0]} has given up before the start; see what it printed")

    def network_environment(self) -> dict[str, str]:
        """Return the environment variables that bind gloo and NCCL to the interface by which the others are reached."""
        interface = interface_of(self.meeting.address)
        return {
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or interface,
            "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME") or f"={interface}",
        }


def without_values(arguments: Sequence[str], options: Collection[str]) -> list[str]:
    """The arguments without some options and their values (``--join HOST``, ``--join=HOST``)."""
    kept: list[str] = []
    skips = False
    for argument in arguments:
        if not skips and argument.partition("=")[0] not in options:
            kept.append(argument)
        skips = not skips and argument in options
    return kept


def _number(config: MachineSettings, otherwise: int) -> int:
    return otherwise if config.nodes == "auto" else config.nodes


def _least(config: MachineSettings, number: int) -> int:
    return number if config.min_nodes == "auto" else min(config.min_nodes, number)


@dataclass(frozen=True)
class _Slurm:
    """A step of a Slurm job with several nodes, one task on each."""

    job: int
    index: int
    num_nodes: int

    @classmethod
    def step(cls) -> _Slurm | None:
        """The step that this process is a task of; None outside of one, or with one node.

        Raises:
            UserError: it has several tasks on a node.
        """
        values = {
            name: os.environ.get(f"SLURM_{name}", "")
            for name in ("JOB_ID", "NODEID", "STEP_NUM_NODES", "STEP_NUM_TASKS")
        }
        if not all(value.isdecimal() for value in values.values()) or values["STEP_NUM_NODES"] == "1":
            return None
        if values["STEP_NUM_TASKS"] != values["STEP_NUM_NODES"]:
            rule = f"starts {values['STEP_NUM_TASKS']} tasks on {values['STEP_NUM_NODES']} nodes"
            remedy = "start one on each, which starts a process for each GPU itself: srun --ntasks-per-node=1"
            raise UserError(Fault("this Slurm step", rule, remedy=remedy))
        return cls(int(values["JOB_ID"]), int(values["NODEID"]), int(values["STEP_NUM_NODES"]))

    def endpoint(self) -> Endpoint:
        """Where the step's first node listens."""
        nodes = os.environ.get("SLURM_STEP_NODELIST", "")
        port = DEFAULT_PORT + self.job % _SLURM_PORTS
        first = ""
        with contextlib.suppress(OSError, IndexError):
            listed = subprocess.run(
                ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False
            )
            first = listed.stdout.split()[0]
            address = str(socket.getaddrinfo(first, port, type=socket.SOCK_STREAM)[0][4][0])
            if not address.startswith("127."):
                return Endpoint(address, port)
        # Of the machine where srun was called, which in a batch script is the job's first node.
        if launched := os.environ.get("SLURM_LAUNCH_NODE_IPADDR"):
            return Endpoint(launched, port)
        rule = f"its first node, {first or nodes}, has no address that this one knows"
        raise UserError(
            Fault("this Slurm step", rule, remedy=f"name it: {HOST} on the first node, {JOIN} on the others")
        )
