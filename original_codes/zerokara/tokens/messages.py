"""What the step says to the nursery of its workers (`worker_process`), beside openers of encoders.

A module of its own: a program that is started as a module knows its own classes under another name than others do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

FORK = "fork"
"""Asks for a worker; the descriptor of its connection follows."""


class Question(Protocol):
    """Something to find out before the workers are there."""

    is_question: bool
    """True: tells a question from an opener."""

    def __call__(self, opened: dict[object, Any]) -> object:
        """Find it out; `opened` are encoders by their openers, and the workers will have what is put there."""
        ...


@dataclass(frozen=True)
class EndOf:
    """Asks for the exit code of a worker, negative for the number of a signal; waits until it has ended."""

    pid: int
