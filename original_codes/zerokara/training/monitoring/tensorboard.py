"""A run's numbers and sample texts for TensorBoard (2.21), in ``tensorboard/`` of the run folder.

Each start writes a file of its own. Its first entry says from which step on its numbers replace those of earlier files,
so that TensorBoard shows each step once. (Its reader drops replaced numbers only: of a text that was written again it
shows both; tensorboard/backend/event_processing/event_accumulator.py, `_Purge`.)
"""

from __future__ import annotations

from pathlib import Path

FOLDER_NAME = "tensorboard"


class TensorBoard:
    """The file of one start: a `metrics.Watcher`."""

    def __init__(self, run_dir: Path, resumed_step: int):
        """Open the file of a start that resumes from `resumed_step` (0: a new run); later steps are replaced."""
        from torch.utils.tensorboard import SummaryWriter  # seconds to import, and only needed where asked for

        first_step = resumed_step + 1 if resumed_step else 0  # a new run begins with the validation of step 0
        self._writer = SummaryWriter(str(run_dir / FOLDER_NAME), purge_step=first_step)

    def numbers(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, markdown: str) -> None:
        self._writer.add_text(name, markdown, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
