"""Mutual authentication: each connection of a node's processes leads to the process of this run that it should.

gloo trusts whoever connects to its ports first, and every user of the machine can connect. So once a group has its
connections, and before anything is computed with them, each process sends each other one a keyed hash of the group, of
itself and of the other, with a key that only the processes of this `rendezvous` share. NCCL does as much by itself: its
peers show a random number that they read from the store (NCCL 2.29, bootstrap.cc).
"""

from __future__ import annotations

import datetime
import functools
import hmac
import os
import secrets

import torch
import torch.distributed
from torch.distributed import AllToAllOptions, FileStore, ProcessGroup, distributed_c10d

from zerokara.errors import RunError
from zerokara.training.processes import rendezvous

_PROOF_BYTES = 32
"""Length of a keyed hash: SHA-256."""


def authenticate(within_seconds: float) -> None:
    """Authenticate the processes of all gloo groups to each other; every process must call it.

    Does nothing in processes without a `rendezvous`.

    Raises:
        RunError: some process did not prove within `within_seconds` that it is part of this run.
    """
    key = shared_key()
    if key is None:
        return
    for group in list(distributed_c10d._world.pg_map):
        if torch.distributed.get_backend(group) == "gloo" and group.size() > 1:
            _authenticate(group, key, datetime.timedelta(seconds=within_seconds))


@functools.cache
def shared_key() -> bytes | None:
    """A random number that the processes of a rendezvous share, and nobody else knows; None without a rendezvous."""
    method = rendezvous.init_method()
    if method is None:
        return None
    store = FileStore(method.removeprefix("file://"), int(os.environ["WORLD_SIZE"]))
    if os.environ["RANK"] == "0":
        store.set("zerokara_key", secrets.token_hex())
    return bytes(store.get("zerokara_key"))


def _authenticate(group: ProcessGroup, key: bytes, deadline: datetime.timedelta) -> None:
    ranks = torch.distributed.get_process_group_ranks(group)
    own = torch.distributed.get_rank()
    sent = torch.tensor(list(b"".join(_proof(key, group, own, other) for other in ranks)), dtype=torch.uint8)
    received = torch.zeros_like(sent)
    options = AllToAllOptions()
    options.timeout = deadline  # torch.distributed.all_to_all_single would wait for as long as the group does
    try:
        group.alltoall_base(received, sent, [], [], options).wait()
    except RuntimeError as error:
        raise _failure("some process", f"did not answer within {deadline.total_seconds():g} s") from error
    for other, proof in zip(ranks, received.split(_PROOF_BYTES), strict=True):
        if not hmac.compare_digest(bytes(proof.tolist()), _proof(key, group, other, own)):
            raise _failure(f"process {other}", "did not prove that it is part of this run")


def _proof(key: bytes, group: ProcessGroup, sender: int, receiver: int) -> bytes:
    return hmac.digest(key, f"{group.group_name} {sender} {receiver}".encode(), "sha256")


def _failure(who: str, what: str) -> RunError:
    return RunError(
        f"{who} {what}: another program on this machine may have connected in its place. Nothing was computed; start "
        "again, and if it happens again, ask who else uses this machine"
    )
