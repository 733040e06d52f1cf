"""What step 2 asks of the scheduler of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from zerokara.errors import RunError


class SilentSchedulerError(RunError):
    """The scheduler does not answer just now, so nobody knows what is at work."""


class Scheduler(Protocol):
    """A scheduler that runs parts on the machines of a cluster."""

    @property
    def name(self) -> str:
        """As the setting has it."""
        ...

    @property
    def num_workers(self) -> int | None:
        """Worker processes of a part; None where the machine's cores decide."""
        ...

    def start(self, folder: Path, numbers: Sequence[int]) -> None:
        """Have these parts run, each once.

        Raises:
            RunError: the scheduler refuses them.
        """
        ...

    def at_work(self, folder: Path) -> set[int]:
        """The parts that wait for a machine or run on one.

        Raises:
            SilentSchedulerError: the scheduler does not answer.
        """
        ...

    def end(self, folder: Path) -> None:
        """End all parts, and return when none runs any more."""
        ...
