"""The rendezvous of training processes: of one machine's, a file without a name, in memory, of this user alone.

torch's usual rendezvous is a TCP port, which every user of the machine can reach, and whoever reaches it can read and
change what is agreed there. This one is an anonymous file (memfd_create(2)), kept open by the process that starts the
others. They open it through /proc, which Linux allows only to processes of the same user. Nothing has to be deleted:
the file is gone with the last process that holds it.

Processes of several machines meet at the store that the first machine holds (`nodes.meeting`). Without torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator

VARIABLE = "ZEROKARA_RENDEZVOUS"
"""Environment variable that gives a training process the path of the file; where machines are several, the host and
port of their store, and what tells this start of the processes from others."""


@contextlib.contextmanager
def held() -> Iterator[dict[str, str]]:
    """Hold a rendezvous as long as the block lasts; yield the environment variables for the training processes."""
    file = os.memfd_create("zerokara_rendezvous")
    os.fchmod(file, 0o600)
    try:
        yield {VARIABLE: f"/proc/{os.getpid()}/fd/{file}"}
    finally:
        os.close(file)


def store_address() -> tuple[str, int, str] | None:
    """Return host, port and start from `VARIABLE`; None on one machine, and in a process that was given nothing."""
    match os.environ.get(VARIABLE, "").split(" "):
        case [host, port, start]:
            return host, int(port), start
    return None


@functools.cache
def init_method() -> str | None:
    """torch.distributed's init_method, in a process that was given a rendezvous; None in another.

    The file is kept open from here on and outlives the process that made it: should that one be killed, the training
    processes still save.
    """
    path = "" if store_address() else os.environ.get(VARIABLE, "")
    return f"file:///proc/self/fd/{os.open(path, os.O_RDWR)}" if path else None
