"""Signs of life between the machines of a run: a dead machine or a cut link is noticed within `LOST_SECONDS`.

torchrun's agent notices a failed process of its own machine, and a new machine that wants to join; that another
machine is gone it does not see, and processes that wait for it on a GPU wait for half an hour. So a thread on each
machine counts up a number in the store once a second, and looks whether those of the others do. It has a connection of
its own, since on a cut link every request hangs: then the thread's own silence is the sign.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from torch.distributed import Store

INTERVAL_SECONDS = 1.0
LOST_SECONDS = 10.0
"""Without a sign of life for so long, a machine counts as lost."""


class Heartbeat:
    """The signs of life of one round of training; a context manager."""

    def __init__(self, store: Store, index: int, hosts: Mapping[int, str], also: Callable[[], None]):
        """`store` is of this round alone; `hosts` names the other machines by their index in it.

        `also` is called with each sign of life: it may use the network too.
        """
        self._store, self._index, self._hosts, self._also = store, index, dict(hosts), also
        self._ended = threading.Event()
        self._answered = time.monotonic()
        """When the store answered last."""
        self._counted: dict[int, tuple[int, float]] = {}
        """The number of each other machine, and since when it is that."""
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(2 * INTERVAL_SECONDS)  # one that hangs in a request is left alone

    @property
    def reaches_store(self) -> bool:
        """Whether the store has answered lately."""
        return time.monotonic() - self._answered <= LOST_SECONDS

    def lost(self) -> str:
        """What is lost, for people: a machine, or the way to the first one; empty while all is well."""
        now = time.monotonic()
        if not self.reaches_store:
            return f"no answer from the first machine for {now - self._answered:.0f} s"
        for index, (_, since) in sorted(self._counted.items()):
            if now - since > LOST_SECONDS:
                return f"no sign of life from {self._hosts[index]} for {now - since:.0f} s"
        return ""

    def _beat(self) -> None:
        now = time.monotonic()
        self._counted = dict.fromkeys(self._hosts, (-1, now))
        self._answered = now
        number = 0
        while not self._ended.wait(INTERVAL_SECONDS):
            number += 1
            try:
                self._store.set(f"beat/{self._index}", str(number))
                for index in self._hosts:
                    key = f"beat/{index}"
                    found = int(self._store.get(key)) if self._store.check([key]) else -1
                    if found != self._counted[index][0]:
                        self._counted[index] = (found, time.monotonic())
                self._also()
                self._answered = time.monotonic()
            except (RuntimeError, OSError):  # the store is gone; not answering for long enough says so
                continue
