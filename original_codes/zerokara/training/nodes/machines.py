"""Machines that train together, as the command that was typed on one of them finds out before they meet.

The first machine was given ``nodes`` above 1, and prints the line for the others, which were given ``--join``. In a
Slurm step with several nodes no option is needed: Slurm's variables name the roles.

A machine's address is found by its routes, never by the host's name: where that leads nowhere, or to 127.0.0.1 as
Debian's installer writes it into /etc/hosts, gloo listens on the loopback interface without a word, and the others wait
for it in vain. Without torch.
"""

import contextlib
import os
import re
import socket
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from zerokara.base.errors import Fault, UserError
from zerokara.config.engine import MachineSettings

JOIN, HOST = "--join", "--host"
DEFAULT_PORT = 29400  # of torchrun's rendezvous
_ANYWHERE = "192.0.2.1"  # an address that nobody has (RFC 5737): its route is the default route
_SLURM_PORTS = 1000  # each job of a machine takes its own port, by its number


class Endpoint(NamedTuple):
    """Address and port at which the first machine listens: ``10.0.0.1:29400``."""

    host: str
    port: int = DEFAULT_PORT

    @classmethod
    def parse(cls, text: str, option: str) -> "Endpoint":
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
    min_number: int = 1
    endpoint: Endpoint | None = None  # None where there is one machine
    is_first: bool = True  # holds the store at which they meet
    command_to_join: str = ""  # for each of the others; empty where they know it already
    has_met: bool = False  # True once this machine has joined the rendezvous

    @classmethod
    def of(cls, config: MachineSettings, join: str | None, host: str | None, resume_command: str) -> "Machines":
        """Find out the role of this machine; `resume_command` is what was typed here.

        Raises:
            UserError: the options or Slurm's variables contradict the settings; or there is no default route.
        """
        in_slurm, tasks = (int(os.environ.get(f"SLURM_STEP_NUM_{what}", "1")) for what in ("NODES", "TASKS"))
        if join or host:
            in_slurm = 1
        elif in_slurm not in (1, tasks):
            remedy = "start one on each, which starts a process for each GPU itself: srun --ntasks-per-node=1"
            raise UserError(Fault("this Slurm step", f"starts {tasks} tasks on {in_slurm} nodes", remedy=remedy))
        number = (2 if join else in_slurm) if config.nodes == "auto" else config.nodes
        if in_slurm > 1 and number != in_slurm:
            rule = f"must be {in_slurm}, the nodes of this Slurm step, or auto"
            raise UserError(config.fault("nodes", rule, "set nodes: auto, or change --nodes of srun"))
        min_number = number if config.min_nodes == "auto" else config.min_nodes
        if min_number > number:
            rule, remedy = f"must be at most {number}, the machines of this run", f"set nodes, or try {number}"
            raise UserError(config.fault("min_nodes", rule, remedy, ["nodes"]))
        if number == 1:
            if option := "--join" if join else "--host" if host else "":
                rule = f"means one machine, and {option} is for a run on several"
                raise UserError(config.fault("nodes", rule, f"set their number, or leave {option} out"))
            return cls()
        # torch warns of each machine whose address has no name, which is nothing to act on.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if join:
            return cls(number, min_number, Endpoint.parse(join, JOIN), is_first=False)
        if in_slurm > 1:
            return cls(number, min_number, _slurm_endpoint(), is_first=os.environ["SLURM_NODEID"] == "0")
        try:
            endpoint = Endpoint.parse(host, HOST) if host else Endpoint(address_towards(_ANYWHERE))
        except OSError:
            rule = f"this machine has no default route to tell its address by; it has {', '.join(own_addresses())}"
            remedy = f"name the one that the other machines reach: {HOST} 10.0.0.1"
            raise UserError(Fault(HOST, rule, remedy=remedy)) from None
        typed = re.sub(rf" {HOST}[ =]\S+", "", resume_command)
        return cls(number, min_number, endpoint, command_to_join=f"{typed} {JOIN} {endpoint}")


def address_towards(host: str) -> str:
    """Return the address of this machine from which packets to `host` leave.

    Raises:
        OSError: there is no route to it, or no such host.
    """
    family, kind, protocol, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(there)  # of a datagram socket: looks up the route, and sends nothing
        return str(probe.getsockname()[0])


def own_addresses() -> list[str]:
    """Return the addresses of this machine, IPv4 and IPv6."""
    interfaces, families = psutil.net_if_addrs().values(), (socket.AF_INET, socket.AF_INET6)
    return [each.address for addresses in interfaces for each in addresses if each.family in families]


def _slurm_endpoint() -> Endpoint:
    """Return the endpoint of the first node of this Slurm step."""
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
