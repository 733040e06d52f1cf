"""The ways in which a step ends early, and how a fault is worded.

A *user error* (exit code 2) means that the configuration or the input is wrong and that nothing was done; it holds
every fault that was found, each with its place, the value found, the rule that it breaks, and a remedy. A *run error*
(exit code 1) means that something failed while running. A step that is *stopped* (exit code 130) goes on when it is run
again, or says what it takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class _ABSENT:
    """No value was given; a class, since it stays the same one on the way from a worker process."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: ``config.yaml:14: lr = -1: must be greater than 0; try 3e-4``."""

    where: str
    """``file:line``, or the file or folder at fault."""
    rule: str
    """What must hold (``must be greater than 0``)."""
    key: str | None = None
    found: object = _ABSENT
    """The value found; left out of the text when not given."""
    remedy: str = ""
    """What to do, with numbers where there are any."""

    def __str__(self) -> str:
        value = "" if self.found is _ABSENT else f" = {self.found}"
        subject = f"{self.key}{value}: " if self.key else ("" if self.found is _ABSENT else f"{self.found}: ")
        place = f"{self.where}: " if self.where else ""
        return f"{place}{subject}{self.rule}" + (f"; {self.remedy}" if self.remedy else "")


class UserError(Exception):
    """The configuration or the input is wrong. Holds every fault found, so that all can be mended at once."""

    exit_code = 2

    def __init__(self, faults: Fault | str | Iterable[Fault]):
        if isinstance(faults, str):
            faults = Fault(where="", rule=faults)
        self.faults: list[Fault] = [faults] if isinstance(faults, Fault) else list(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


class RunError(Exception):
    """Something failed while running; the message says what, where, found, expected, and the remedy."""

    exit_code = 1


class Stopped(KeyboardInterrupt):
    """A step was stopped as by Ctrl-C, and the same command would not go on; the message says what would."""
