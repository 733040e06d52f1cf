"""What must hold of every step: its loss and its gradient are finite, and where asked for, its loss does not leap.

A step that breaks this is skipped: the weights, the optimizer's running means and its count stay as if it had not been.
It counts as a step all the same: the position in the data and the learning rate go on, so that both stay functions of
the step's number. What is remembered stands in the checkpoint, and so a resumed run judges as an unbroken one.
"""

from __future__ import annotations

import math
from collections import deque

from zerokara.checkpoint import TrainingState
from zerokara.config import PretrainConfig
from zerokara.errors import RunError

WINDOW_STEPS = 100
"""Good losses that a leap is measured against."""
FEWEST_STEPS = 20
"""Before there are so many, nothing is called a leap: the loss falls steeply at the start, and a deviation of a few
values says little."""


class GivenUp(RunError):
    """Too many steps in a row were skipped. Raised in every process at the same step."""


class StepGuard:
    """Judges steps; every process judges alike, since all know the same losses."""

    def __init__(self, config: PretrainConfig, state: TrainingState):
        self._sigmas, self._most = config.spike_sigmas, config.max_skipped_steps
        self.skipped_steps, self.skipped_in_row = state.skipped_steps, state.skipped_in_row
        self._losses = deque(state.recent_losses, maxlen=WINDOW_STEPS)

    @property
    def recent_losses(self) -> tuple[float, ...]:
        """The last good ones, oldest first."""
        return tuple(self._losses)

    def skip_reason_of_loss(self, loss: float) -> str:
        """Why a step with this loss must not reach the weights; nothing if it may."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not self._sigmas or len(self._losses) < FEWEST_STEPS:
            return ""
        mean = math.fsum(self._losses) / len(self._losses)
        deviation = math.sqrt(math.fsum((past - mean) ** 2 for past in self._losses) / len(self._losses))
        if loss <= mean + self._sigmas * deviation:
            return ""
        how_far = f"{(loss - mean) / deviation:.1f} deviations" if deviation else "far"
        return (
            f"the loss {loss:.4f} is {how_far} above the last {len(self._losses)} steps' mean of {mean:.4f} "
            f"(spike_sigmas is {self._sigmas:g})"
        )

    @staticmethod
    def skip_reason_of_norm(norm: float) -> str:
        """As `skip_reason_of_loss`, of the gradient's norm."""
        return "" if math.isfinite(norm) else "the gradient is not finite"

    def note(self, loss: float, skip_reason: str) -> None:
        """Take in a step that was judged."""
        if skip_reason:
            self.skipped_steps += 1
            self.skipped_in_row += 1
        else:
            self.skipped_in_row = 0
            self._losses.append(loss)

    def require_patience(self, step: int, reason: str) -> None:
        """See that a step that was skipped, and noted, is not one too many.

        Raises:
            GivenUp: it is.
        """
        if self.skipped_in_row > self._most:
            raise GivenUp(
                f"step {step}: {reason}; {self.skipped_in_row} skipped in a row, and max_skipped_steps is {self._most}."
                " The weights were not touched. Look at the documents named above; resume from the newest checkpoint "
                "with a lower learning rate (--set lr=…), or allow more (--set max_skipped_steps=…)"
            )
