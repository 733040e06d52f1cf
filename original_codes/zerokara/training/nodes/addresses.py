"""This machine's address as another one reaches it, by its routes, and the network interface of that address.

Never by the host's name: where that leads nowhere, or to 127.0.0.1 as Debian's installer writes it into /etc/hosts,
gloo listens on the loopback interface and says nothing, and the others wait for it in vain. Without torch.
"""

from __future__ import annotations

import ipaddress
import socket

import psutil

from zerokara.errors import Fault, UserError

DEFAULT_PORT = 29400
"""As torchrun's rendezvous has it."""
_ANYWHERE = "192.0.2.1"
"""An address that nobody has (RFC 5737): the way to it is the default route."""


class Endpoint:
    """Where the first machine listens: ``10.0.0.1:29400``."""

    def __init__(self, host: str, port: int = DEFAULT_PORT):
        self.host, self.port = host, port

    @classmethod
    def parse(cls, text: str, option: str) -> Endpoint:
        """Read ``HOST`` or ``HOST:PORT``, an IPv6 address in brackets.

        Raises:
            UserError: it is neither; names `option`.
        """
        host, _, port = text.rpartition(":") if not text.endswith("]") and ":" in text else (text, "", "")
        host = host.strip("[]")
        if not host or (port and not (port.isdecimal() and 0 < int(port) < 2**16)):
            rule = "must be the first machine's address and port, as its own start prints them"
            raise UserError(Fault(option, rule, value=text, remedy=f"e.g. {option} 10.0.0.1:{DEFAULT_PORT}"))
        return cls(host, int(port) if port else DEFAULT_PORT)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Endpoint) and (self.host, self.port) == (other.host, other.port)

    def __hash__(self) -> int:
        return hash((self.host, self.port))


def address_towards(host: str) -> str:
    """The address of this machine from which packets to `host` leave.

    Raises:
        OSError: there is no route to it, or no such host.
    """
    family, kind, protocol, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(there)  # of a datagram socket: looks up the route, and sends nothing
        return str(probe.getsockname()[0])


def own_address() -> str:
    """The address of this machine by its default route; without one, the only address that is not a loopback one.

    Raises:
        UserError: it has none, or several; names them.
    """
    try:
        return address_towards(_ANYWHERE)
    except OSError:
        found = sorted(address for address, _ in _addresses() if not ipaddress.ip_address(address).is_loopback)
    if len(found) == 1:
        return found[0]
    rule = (
        f"this machine has no default route, and {len(found)} addresses ({', '.join(found)})"
        if found
        else ("this machine has no address at which another one could reach it")
    )
    raise UserError(Fault("--host", rule, remedy="name the one that the other machines reach: --host 10.0.0.1"))


def check_own(address: str) -> None:
    """Check that an address is this machine's.

    Raises:
        UserError: it is not; names those that are.
    """
    own = [each for each, _ in _addresses()]
    if address not in own:
        rule = f"is no address of this machine, which has {', '.join(own)}"
        raise UserError(Fault("--host", rule, value=address, remedy="name one of them"))


def interface_of(address: str) -> str:
    """The network interface that has an address of this machine, as gloo and NCCL want it named."""
    return next(name for each, name in _addresses() if each == address)


def _addresses() -> list[tuple[str, str]]:
    """Each address of this machine, and the name of its interface."""
    return [
        (each.address.partition("%")[0], name)  # fe80::1%eth0
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6)
    ]
