"""Locks that the kernel lets go of when their process ends, however it ends (flock(2)), on file systems of all kinds.

The lock is always of a file that is open for writing: NFS makes of it a byte-range lock, which it refuses for a folder
and for what is open to be read only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import orjson

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""What file systems say that have none: NFS without its lock daemon, Lustre mounted without ``flock``, some FUSE."""
_SIGNING_SECONDS = 0.02
_told: set[Path] = set()


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, as it wrote into the file."""

    pid: int
    host: str

    @property
    def is_here(self) -> bool:
        """Whether it is on this machine."""
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"process {self.pid}" + ("" if self.is_here else f" on {self.host}")


def try_lock(file: IO[bytes]) -> bool:
    """Take the lock of a file that is open for writing, or find that another process has it.

    Where the file system has no locks, it is taken for got, with a word.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            error.filename = str(file.name)
            raise
        folder = Path(file.name).parent
        if folder not in _told:
            _told.add(folder)
            print(
                f"{folder}: this file system has no locks ({error.strerror}): see to it yourself that no second "
                "command works here at the same time, or mount it with locks (Lustre: flock; NFS: without nolock)",
                flush=True,
            )
    return True


def is_linked(file: IO[bytes], path: Path) -> bool:
    """Whether an open file still has its name: whoever held the lock before may have taken it away."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def write_holder(file: IO[bytes]) -> None:
    """Write into a file whose lock is held who holds it."""
    file.truncate(0)
    file.write(orjson.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    file.flush()


def read_holder(path: Path) -> Holder | None:
    """Who holds the lock of a file, if that is known; it signs a moment after it took it."""
    for _ in range(5):
        with suppress(FileNotFoundError, orjson.JSONDecodeError):
            return Holder(**orjson.loads(path.read_bytes()))
        time.sleep(_SIGNING_SECONDS)
    return None


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Make a file and hold its lock, as long as the block lasts; the file is gone afterwards.

    Gives False, and holds nothing, where another process has it.
    """
    while True:
        file = open(path, "ab")  # noqa: SIM115  # closed below
        if not try_lock(file):
            file.close()
            yield False
            return
        if is_linked(file, path):
            break
        file.close()  # its owner has just left and taken the file away
    try:
        write_holder(file)
        yield True
    finally:
        if is_linked(file, path):
            path.unlink()
        file.close()
