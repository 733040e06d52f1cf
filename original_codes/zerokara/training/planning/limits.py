"""Hours that a run may take: over all its starts (`max_hours`), and for one start (`max_hours_per_start`).

A limit asks as a person would with Ctrl-C: the run is saved at the edge of a step and left. Only the first process
checks its clock; the others learn of it in the collective of the step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from zerokara.config.optim import ScheduleSettings
from zerokara.errors import UserError
from zerokara.progress import seconds_text

STARTED_NAME = "ZEROKARA_STARTED"
"""Environment variable in which the launching process tells when it was started, in seconds since 1970."""
HOUR = 3600.0
RAISE = "raise it to go on"
"""What the same command needs once `max_hours` is used up."""
_SAVE_SECONDS = 30.0
"""To leave: the last step, gathering the state, ending the processes."""
_SAVE_BYTES_A_SECOND = 100e6
"""To write: what a slow disk takes."""


class TimeLimits:
    """The limits of one start; `look` is for `StopRequest.watch`."""

    def __init__(
        self,
        config: ScheduleSettings,
        checkpoint_bytes: int,
        seconds: Callable[[], float],
        clock: Callable[[], float] = time.time,
    ):
        """`seconds` gives the time trained in all starts; `clock` seconds since 1970."""
        self._config, self._seconds, self._clock = config, seconds, clock
        self._started = float(os.environ.get(STARTED_NAME, clock()))
        self._leave_seconds = leave_seconds(checkpoint_bytes)

    def look(self) -> str:
        """A reason to stop, once a limit is reached."""
        config = self._config
        if are_used_up(config, self._seconds()):
            return f"max_hours = {config.max_hours:g} ({RAISE})"
        if config.max_hours_per_start != "auto":
            left = config.max_hours_per_start * HOUR - (self._clock() - self._started)
            if left <= self._leave_seconds:
                return f"max_hours_per_start = {config.max_hours_per_start:g}, {seconds_text(max(0, left))} before it"
        return ""


def are_used_up(config: ScheduleSettings, trained_seconds: float) -> bool:
    """Whether a run that was trained so long has had its `max_hours`."""
    return config.max_hours != "auto" and trained_seconds >= config.max_hours * HOUR


def leave_seconds(checkpoint_bytes: int) -> float:
    """How long before the end of `max_hours_per_start` a run is left: saving takes time."""
    return _SAVE_SECONDS + checkpoint_bytes / _SAVE_BYTES_A_SECOND


def remedy(take: str) -> str:
    """What to do once `max_hours` is used up; `take` is the command that converts what is there."""
    return f"{RAISE}; or take what is there: {take}"


def check_hours(config: ScheduleSettings, checkpoint_bytes: int, trained_seconds: float, take: str) -> None:
    """See that the limits leave anything to do; `take` is the command that converts what is there.

    Raises:
        UserError: the run has had its hours, or a start has not enough of them to train and save.
    """
    if are_used_up(config, trained_seconds):
        rule = f"the run has been trained for {trained_seconds / HOUR:.3g} hours already, as long as it may"
        raise UserError(config.fault("max_hours", rule, remedy(take)))
    if config.max_hours_per_start != "auto":
        needed = leave_seconds(checkpoint_bytes)
        if config.max_hours_per_start * HOUR <= needed:
            rule = (
                f"leaves no time to train: {seconds_text(config.max_hours_per_start * HOUR)}, of which the last "
                f"{seconds_text(needed)} are kept for saving and leaving"
            )
            raise UserError(config.fault("max_hours_per_start", rule, "ask for more time"))
