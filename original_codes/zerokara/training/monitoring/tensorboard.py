"""A run's numbers and sample texts for TensorBoard (2.21), in ``tensorboard/`` of the run folder.

Each start writes a file of its own. It says from which step on its numbers replace those of the files before, so that
TensorBoard shows each step once. (Its reader takes back numbers only: of a text that was written again it shows both;
tensorboard/backend/event_processing/event_accumulator.py, `_Purge`.)
"""

from __future__ import annotations

from pathlib import Path

FOLDER_NAME = "tensorboard"


class TensorBoard:
    """The file of one start."""

    def __init__(self, run_dir: Path, first_step: int):
        """What stands there of `first_step` and later steps counts no longer."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / FOLDER_NAME), purge_step=first_step)

    def numbers(self, step: int, values: dict[str, float]) -> None:
        """Record numbers of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, markdown: str) -> None:
        """Record a text of a step."""
        self._writer.add_text(name, markdown, step)

    def flush(self) -> None:
        """Bring what was recorded to disk."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and end."""
        self._writer.close()
