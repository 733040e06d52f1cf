"""The meeting of the machines that train together: who is there, and what each tells the others.

The first machine holds a store (torch's TCPStore), which the others find at its address; everything that the machines
agree on goes through it, torchrun's own rendezvous too. Whoever reaches its port can read and change it, and the
rendezvous holds pickles: the network between the machines must be theirs alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import orjson
from torch.distributed import PrefixStore, Store, TCPStore

from zerokara.errors import Fault, RunError, UserError
from zerokara.training.nodes.addresses import Endpoint, address_towards

CONNECT_SECONDS = 300.0
"""How long a machine waits for the first one to be there: it may be started later."""
ATTEMPT_SECONDS = 15.0
"""Of which one attempt to connect takes so many at most."""
ANSWER_SECONDS = 60.0
"""How long a machine that has arrived may take for what takes seconds."""
GRACE_SECONDS = 30.0
"""How long the others are waited for once as many are there as are needed at least."""
LEAVE_SECONDS = 20.0
"""How long the first machine waits at its end for the others to leave."""
_POLL_SECONDS = 0.2


class LostFirstMachine(RunError):
    """The first machine, which holds the meeting, is gone or out of reach."""


@dataclass(frozen=True)
class Meeting:
    """The meeting, as one of the machines sees it."""

    store: Store
    endpoint: Endpoint
    """Where the store is."""
    address: str
    """This machine's address, as the others reach it."""
    index: int
    """The order of arrival; the first machine is 0."""

    @property
    def is_first(self) -> bool:
        """Whether this machine holds the store."""
        return self.index == 0

    def tell(self, what: str, content: object) -> None:
        """Leave a message of this machine for all."""
        self.store.set(f"{what}/{self.index}", orjson.dumps(content).decode())

    def hear(self, what: str, index: int, seconds: float = ANSWER_SECONDS) -> Any:
        """Wait for the message of machine `index`; None where it does not come in time."""
        deadline = time.monotonic() + seconds
        key = f"{what}/{index}"
        while not self.store.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_SECONDS)
        return orjson.loads(self.store.get(key))

    def hear_from_first(self, what: str, seconds: float = ANSWER_SECONDS) -> Any:
        """Wait for a message of the first machine.

        Raises:
            RunError: it has not come in time.
        """
        found = self.hear(what, 0, seconds)
        if found is None:
            raise RunError(f"the first machine, {self.endpoint}, has given up; see what it printed")
        return found

    def left(self) -> None:
        """Say that a machine has left, this one or a lost one: nobody waits for it."""
        self.store.add("left", 1)

    def wait_for_all(self, count: int, least: int, seconds: float = float("inf")) -> int:
        """Wait until `count` machines are there, or the `least` number and for `GRACE_SECONDS` nobody more.

        Every machine calls it, and gets how many there are. One that comes later gets 0.

        Raises:
            RunError: too few have come within `seconds`.
        """
        if self.is_first:
            arrived = self._count_arriving(count, least, seconds)
            self.tell("attempt", f"{time.time_ns():x}")
            self.store.set("count", str(arrived))
            return arrived
        found = self._get("count", seconds)
        return int(found) if self.index < int(found) else 0

    def _count_arriving(self, count: int, least: int, seconds: float) -> int:
        started = changed = time.monotonic()
        seen = 1
        while seen < count:
            now = time.monotonic()
            if (arrived := self.store.add("arrived", 0)) != seen:
                seen, changed = arrived, now
            if seen >= least and now - changed > GRACE_SECONDS:
                break
            if now - started > seconds:
                raise RunError(f"only {seen} of {count} machines have come within {seconds:g} s")
            time.sleep(_POLL_SECONDS)
        return min(seen, count)

    def _get(self, key: str, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        while not self.store.check([key]):
            if time.monotonic() > deadline:
                raise RunError(f"the first machine, {self.endpoint}, has not gone on within {seconds:g} s")
            time.sleep(_POLL_SECONDS)
        return bytes(self.store.get(key))


@contextmanager
def held(endpoint: Endpoint) -> Iterator[Meeting]:
    """Hold a meeting at an address of this machine, as long as the block lasts.

    Raises:
        UserError: another program has the port.
    """
    try:
        server = TCPStore(endpoint.host, endpoint.port, is_master=True, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        rule = f"port {endpoint.port} of this machine is taken: {str(error).splitlines()[0]}"
        remedy = f"stop what listens there, or take another: --host {Endpoint(endpoint.host, endpoint.port + 1)}"
        raise UserError(Fault("--host", rule, value=str(endpoint), remedy=remedy)) from error
    store = PrefixStore("zerokara", server)
    index = store.add("arrived", 1) - 1
    met = Meeting(store, endpoint, endpoint.host, index)
    try:
        yield met
    finally:
        # The others still read here why they end.
        deadline = time.monotonic() + LEAVE_SECONDS
        while store.add("left", 0) < store.add("arrived", 0) - 1 and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        del store, server


def _connected(endpoint: Endpoint) -> TCPStore:
    """Connect to the store of the first machine, and try for `CONNECT_SECONDS`, in short attempts.

    A single long one was seen to hang, once in hundreds, where both machines started at the same moment.

    Raises:
        RuntimeError: nobody answers.
    """
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            attempt = timedelta(seconds=ATTEMPT_SECONDS)
            client = TCPStore(endpoint.host, endpoint.port, is_master=False, wait_for_workers=False, timeout=attempt)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
        else:
            client.set_timeout(timedelta(seconds=CONNECT_SECONDS))
            return client


@contextmanager
def joined(endpoint: Endpoint) -> Iterator[Meeting]:
    """Take part in the meeting at an endpoint, as long as the block lasts.

    Raises:
        UserError: nobody holds one there.
    """
    try:
        address = address_towards(endpoint.host)
        client = _connected(endpoint)
    except (RuntimeError, OSError) as error:
        rule = f"nobody answers there ({str(error).splitlines()[0]})"
        remedy = (
            "start the first machine, and type the line that it prints; if it waits already, see whether its firewall "
            f"lets port {endpoint.port} in"
        )
        raise UserError(Fault("--join", rule, value=str(endpoint), remedy=remedy)) from error
    store = PrefixStore("zerokara", client)
    met = Meeting(store, endpoint, address, store.add("arrived", 1) - 1)
    is_lost = False
    try:
        yield met
    except LostFirstMachine:
        is_lost = True
        raise
    finally:
        if not is_lost:  # on a cut link the request would hang
            with contextlib.suppress(RuntimeError):  # the first machine has ended
                met.left()
