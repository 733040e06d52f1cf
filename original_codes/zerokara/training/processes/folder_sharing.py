"""Which processes see the same run folder: machines may share a disk or each have their own.

The machines find it out before they start the processes (`nodes.meeting.Meeting.claims`), and tell them. Processes that
share a folder write one checkpoint together, a share each; where machines have folders of their own, each folder gets a
whole checkpoint from the processes of its machine. So every machine that is left can go on, and one that lacks the
checkpoint (it is new, or its disk was full) gets the tensors from one that has it.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from zerokara.training.processes.joining import Processes

VARIABLE = "ZEROKARA_RUN_FOLDER"
"""Environment variable that gives a training process the number of the machine that speaks for its run folder. It
stays right where machines are lost or come back."""


@dataclass(frozen=True)
class FolderSharing:
    """The processes that see this process's run folder."""

    ranks: tuple[int, ...]
    index: int
    """This process among them."""

    @property
    def leads(self) -> bool:
        """Whether this process speaks for the folder."""
        return self.index == 0

    @property
    def host(self) -> str:
        """The machine's name."""
        return socket.gethostname()


def find(processes: Processes) -> FolderSharing:
    """Find out who shares this process's run folder, from what its machine was told; every process must call it."""
    folders = processes.numbers_of_all(int(os.environ.get(VARIABLE, "0")))
    ranks = tuple(rank for rank, folder in enumerate(folders) if folder == folders[processes.rank])
    return FolderSharing(ranks, ranks.index(processes.rank))
