"""Where a step stands in the data: pure arithmetic, counted from the checkpoint that a start resumed from."""

from __future__ import annotations

from dataclasses import dataclass

from zerokara.checkpoint import TrainingState


@dataclass(frozen=True)
class Position:
    """The steps of one start; an earlier start may have had another global batch."""

    first_step: int
    """Steps that were done before this start."""
    first_samples: int
    """Sequences that were read before it."""
    global_batch_size: int
    sample_tokens: int

    @classmethod
    def resumed_from(cls, state: TrainingState, global_batch_size: int, sample_tokens: int) -> Position:
        """The position of a start that resumes from `state`."""
        return cls(state.step, state.samples, global_batch_size, sample_tokens)

    def samples(self, step: int) -> int:
        """Sequences read after `step` steps."""
        return self.first_samples + (step - self.first_step) * self.global_batch_size

    def tokens(self, step: int) -> int:
        """Tokens read after `step` steps."""
        return self.samples(step) * self.sample_tokens
