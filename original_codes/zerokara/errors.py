"""The ways in which a step ends early, and how a fault is worded.

A *user error* (exit code 2) means that the configuration or the input is wrong and that nothing was done; it holds
every fault that was found, each with its place, the value found, the rule that it breaks, and a remedy. A *run error*
(exit code 1) means that something failed while running. A step that is *stopped* (exit code 130) goes on when it is run
again, or says what it takes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

_ABSENT = object()
_NOT_SHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\\]")
"""What ends a line, steers a terminal, turns the direction of writing, or stands for a byte that is no UTF-8."""


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


def shown(path: str | os.PathLike[str]) -> str:
    """A name of a file as text that any terminal, log and JSON file can hold, without loss.

    Bytes that are no UTF-8 are spelt ``\\xNN``, what would end a line or steer a terminal ``\\uNNNN``, and a backslash
    is doubled.
    """
    return _NOT_SHOWN.sub(_spelt, os.fspath(path))


def _spelt(match: re.Match[str]) -> str:
    character = match[0]
    if character == "\\":
        return "\\\\"
    code = ord(character)
    # As os.fsdecode has them (PEP 383).
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


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
