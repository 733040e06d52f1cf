"""Which machines train together, as the command that was typed on one of them finds out before they meet.

One machine is the first: it was given ``nodes`` above 1, and prints the line for the others. The others were given
``--join``. In a Slurm step with several nodes nobody is told anything: Slurm's variables say who is who.

A machine's address is found by its routes, never by the host's name: where that leads nowhere, or to 127.0.0.1 as
Debian's installer writes it into /etc/hosts, gloo listens on the loopback interface and says nothing, and the others
wait for it in vain. Without torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from zerokara.config.machine import MachineSettings
from zerokara.errors import Fault, UserError

JOIN, HOST = "--join", "--host"
DEFAULT_PORT = 29400
"""As torchrun's rendezvous has it."""
_ANYWHERE = "192.0.2.1"
"""An address that nobody has (RFC 5737): the way to it is the default route."""
_SLURM_PORTS = 1000
"""Jobs of one machine take ports of their own, by their numbers."""


class Endpoint(NamedTuple):
    """Where the first machine listens: ``10.0.0.1:29400``."""

    host: str
    port: int = DEFAULT_PORT

    @classmethod
    def parse(cls, text: str, option: str) -> Endpoint:
        """Read ``HOST`` or ``HOST:PORT``, an IPv6 address in brackets.

        Raises:
            UserError: it is neither; names `option`.
        """
        with contextlib.suppress(ValueError):
            parts = urlsplit(f"//{text}")
            if parts.netloc == text and parts.hostname and parts.port != 0:
                return cls(parts.hostname, parts.port or DEFAULT_PORT)
        rule = "must be the first machine's address and port, as its own start prints them"
        raise UserError(Fault(option, rule, value=text, remedy=f"e.g. {option} 10.0.0.1:{DEFAULT_PORT}"))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass
class Machines:
    """The machines that train together."""

    number: int = 1
    """How many there will be."""
    least: int = 1
    """How many are enough."""
    endpoint: Endpoint | None = None
    """Where they meet; None where they are one."""
    is_first: bool = True
    """Whether this machine holds the meeting."""
    command_to_join: str = ""
    """What is typed on each of the others; empty where they know it already."""
    has_met: bool = False
    """Whether this machine has gone to the meeting."""

    @classmethod
    def of(cls, config: MachineSettings, join: str | None, host: str | None, again: str) -> Machines:
        """Find out who this machine is; `again` is the command that was typed here.

        Raises:
            UserError: the options or Slurm's variables contradict the settings; or there is no default route.
        """
        in_slurm = 1 if join or host else _num_slurm_nodes()
        number = (2 if join else in_slurm) if config.nodes == "auto" else config.nodes
        if in_slurm > 1 and number != in_slurm:
            rule = f"must be {in_slurm}, the nodes of this Slurm step, or auto"
            raise UserError(config.fault("nodes", rule, "set nodes: auto, or change --nodes of srun"))
        if number == 1:
            return cls()
        # torch warns of each machine whose address has no name, which is nothing to act on.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        least = number if config.min_nodes == "auto" else min(config.min_nodes, number)
        if join:
            return cls(number, least, Endpoint.parse(join, JOIN), is_first=False)
        if in_slurm > 1:
            return cls(number, least, _slurm_endpoint(), is_first=os.environ["SLURM_NODEID"] == "0")
        try:
            endpoint = Endpoint.parse(host, HOST) if host else Endpoint(address_towards(_ANYWHERE))
        except OSError:
            rule = f"this machine has no default route to tell its address by; it has {', '.join(own_addresses())}"
            remedy = f"name the one that the other machines reach: {HOST} 10.0.0.1"
            raise UserError(Fault(HOST, rule, remedy=remedy)) from None
        typed = re.sub(rf" {HOST}[ =]\S+", "", again)
        return cls(number, least, endpoint, command_to_join=f"{typed} {JOIN} {endpoint}")


def address_towards(host: str) -> str:
    """The address of this machine from which packets to `host` leave.

    Raises:
        OSError: there is no route to it, or no such host.
    """
    family, kind, protocol, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(there)  # of a datagram socket: looks up the route, and sends nothing
        return str(probe.getsockname()[0])


def own_addresses() -> list[str]:
    """The addresses of this machine, IPv4 and IPv6."""
    found = [each for addresses in psutil.net_if_addrs().values() for each in addresses]
    return [each.address for each in found if each.family in (socket.AF_INET, socket.AF_INET6)]


def _num_slurm_nodes() -> int:
    """Nodes of the Slurm step that this process is the only task of on its node; 1 outside of one.

    Raises:
        UserError: it has several tasks on a node.
    """
    nodes, tasks = (os.environ.get(f"SLURM_STEP_NUM_{what}", "1") for what in ("NODES", "TASKS"))
    if nodes not in ("1", tasks):
        remedy = "start one on each, which starts a process for each GPU itself: srun --ntasks-per-node=1"
        raise UserError(Fault("this Slurm step", f"starts {tasks} tasks on {nodes} nodes", remedy=remedy))
    return int(nodes)


def _slurm_endpoint() -> Endpoint:
    """Where the first node of this Slurm step listens."""
    nodes, port = os.environ["SLURM_STEP_NODELIST"], DEFAULT_PORT + int(os.environ["SLURM_JOB_ID"]) % _SLURM_PORTS
    first = re.sub(r"\[(\d+)[^]]*\]", r"\1", nodes).split(",")[0]  # of node[01-04,7],login: node01
    with contextlib.suppress(OSError):
        address = str(socket.getaddrinfo(first, port, type=socket.SOCK_STREAM)[0][4][0])
        if not address.startswith("127."):
            return Endpoint(address, port)
    # Of the machine where srun was called, which in a batch script is the job's first node.
    if launched := os.environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        return Endpoint(launched, port)
    rule = f"the first of its nodes, {nodes}, has no address that this one knows"
    raise UserError(Fault("this Slurm step", rule, remedy=f"name it: {HOST} on the first node, {JOIN} on the others"))
