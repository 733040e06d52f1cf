"""Which processes see the same run folder, found out and not assumed: machines may share a disk or each have their own.

Processes that share a folder write one checkpoint together, a share each; where machines have folders of their own,
each folder gets a whole checkpoint from the processes of its machine. So every machine that is left can go on, and one
that lacks the checkpoint (it is new, or its disk was full) gets the tensors from one that has it.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from zerokara.training.processes import rendezvous
from zerokara.training.processes.joining import Processes


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


def find(processes: Processes, run_dir: Path) -> FolderSharing:
    """Find out who shares the run folder; every process must call it.

    The processes of one machine do. One of each machine leaves a file in the folder, and looks for those of the others.
    """
    everyone = tuple(range(processes.count))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        return FolderSharing(everyone, processes.rank)
    machine = int(os.environ["GROUP_RANK"])
    machines = processes.numbers_of_all(machine)
    address = rendezvous.store_address()
    assert address is not None, "processes of several machines meet at a store"
    name = f".machine-{address[2]}"  # of this start alone
    probe = run_dir / f"{name}-{machine}.partial"
    speaks = machines.index(machine) == processes.rank
    if speaks:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
    processes.numbers_of_all(0)  # all are written
    first_seen = next(other for other in sorted(set(machines)) if (run_dir / f"{name}-{other}.partial").exists())
    folders = processes.numbers_of_all(first_seen)
    if speaks:
        probe.unlink(missing_ok=True)
    ranks = tuple(rank for rank in everyone if folders[rank] == first_seen)
    return FolderSharing(ranks, ranks.index(processes.rank))
