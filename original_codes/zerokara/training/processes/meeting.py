"""Where the training processes of a node find each other: a file without a name, in memory, of this user alone.

torch's usual meeting place is a TCP port, which every user of the machine can reach, and whoever reaches it can read
and change what is agreed there. This one is an anonymous file (memfd_create(2)), kept open by the process that starts
the others. They open it through /proc, which Linux allows to processes of the same user only. Nothing has to be
deleted: the file is gone with the last process that holds it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Iterator

VARIABLE = "ZEROKARA_MEETING_PLACE"
"""Environment variable that tells a training process the path."""


@contextlib.contextmanager
def place() -> Iterator[dict[str, str]]:
    """Hold a meeting place as long as the block lasts; gives the variables that tell the training processes of it."""
    file = os.memfd_create("zerokara_meeting_place")
    os.fchmod(file, 0o600)
    try:
        yield {VARIABLE: f"/proc/{os.getpid()}/fd/{file}"}
    finally:
        os.close(file)


@functools.cache
def init_method() -> str | None:
    """What torch.distributed calls init_method, for a process that was told of a place; None for another.

    The file is kept open from here on, so that it outlives the process that made it: should that one be killed, the
    training processes still save.
    """
    path = os.environ.get(VARIABLE)
    return f"file:///proc/self/fd/{os.open(path, os.O_RDWR)}" if path else None


@functools.cache
def key() -> bytes | None:
    """A random number that the processes which met in a place share and nobody else knows; None without a place."""
    from torch.distributed import FileStore

    method = init_method()
    if method is None:
        return None
    store = FileStore(method.removeprefix("file://"), int(os.environ["WORLD_SIZE"]))
    if os.environ["RANK"] == "0":
        store.set("zerokara_key", secrets.token_hex())
    return bytes(store.get("zerokara_key"))
