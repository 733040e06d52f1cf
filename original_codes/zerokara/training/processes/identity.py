"""Each connection between the processes of a node leads to a process of this run, and to the one that it should.

gloo takes whoever connects to its ports first at his word, and every user of the machine can connect. So once a group
has its connections, and before anything is computed with them, each process sends each other one of it a proof: a keyed
hash of the group, of itself and of the other, with a key that only processes which met in `meeting.place` know.
NCCL does as much by itself: its peers show a random number that they were told in the store (NCCL 2.29, bootstrap.cc).
"""

from __future__ import annotations

import datetime
import hmac

import torch
import torch.distributed
from torch.distributed import AllToAllOptions, ProcessGroup, distributed_c10d

from zerokara.errors import RunError
from zerokara.training.processes import meeting

_BYTES = 32
"""Length of a proof: SHA-256."""


def prove(within_seconds: float) -> None:
    """Exchange proofs in all groups of this process that gloo serves; every process must call it.

    Nothing happens where the processes have not met in a place of ours.

    Raises:
        RunError: some process did not prove within `within_seconds` that it is of this run.
    """
    key = meeting.key()
    if key is None:
        return
    for group in list(distributed_c10d._world.pg_map):
        if torch.distributed.get_backend(group) == "gloo" and group.size() > 1:
            _prove(group, key, datetime.timedelta(seconds=within_seconds))


def _prove(group: ProcessGroup, key: bytes, deadline: datetime.timedelta) -> None:
    ranks = torch.distributed.get_process_group_ranks(group)
    own = torch.distributed.get_rank()
    sent = torch.tensor(list(b"".join(_proof(key, group, own, other) for other in ranks)), dtype=torch.uint8)
    got = torch.zeros_like(sent)
    options = AllToAllOptions()
    options.timeout = deadline  # torch.distributed.all_to_all_single would wait for as long as the group does
    try:
        group.alltoall_base(got, sent, [], [], options).wait()
    except RuntimeError as error:
        raise RunError(_words("some process", f"did not answer within {deadline.total_seconds():g} s")) from error
    for other, proof in zip(ranks, got.split(_BYTES), strict=True):
        if not hmac.compare_digest(bytes(proof.tolist()), _proof(key, group, other, own)):
            raise RunError(_words(f"process {other}", "did not prove that it is of this run"))


def _proof(key: bytes, group: ProcessGroup, sender: int, receiver: int) -> bytes:
    return hmac.digest(key, f"{group.group_name} {sender} {receiver}".encode(), "sha256")


def _words(who: str, fault: str) -> str:
    return (
        f"{who} {fault}: another program on this machine may have connected in its place. Nothing was computed; start "
        "again, and if it happens again, ask who else uses this machine"
    )
