"""File locks that the kernel releases when their process ends, however it ends (flock(2)).

The file is always open for writing: NFS implements the lock as a byte-range lock, which it refuses for a folder and for
a file that is open for reading only.
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
"""Error numbers of file systems without locks: NFS without its lock daemon, Lustre without ``flock``, some FUSE."""
_WRITE_SECONDS = 0.02
_warned: set[Path] = set()
"""Folders whose file system was reported to have no locks."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, as it wrote itself into the file."""

    pid: int
    host: str

    @property
    def is_here(self) -> bool:
        """Whether it is on this machine."""
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"process {self.pid}" + ("" if self.is_here else f" on {self.host}")


def try_lock(file: IO[bytes]) -> bool:
    """Lock a file that is open for writing; return False if another process has locked it.

    On a file system without locks it prints a warning and returns True.
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
        if folder not in _warned:
            _warned.add(folder)
            print(
                f"{folder}: this file system has no locks ({error.strerror}): make sure that no second command works "
                "here at the same time, or mount it with locks (Lustre: flock; NFS: without nolock)",
                flush=True,
            )
    return True


def is_linked(file: IO[bytes], path: Path) -> bool:
    """Whether an open file still has its name: the holder of the lock before may have deleted it."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def write_holder(file: IO[bytes]) -> None:
    """Write this process into a file whose lock it holds."""
    file.truncate(0)
    file.write(orjson.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    file.flush()


def read_holder(path: Path) -> Holder | None:
    """The process that holds the lock of a file; None if it is unknown. (It writes itself a moment after locking.)"""
    for _ in range(5):
        with suppress(FileNotFoundError, orjson.JSONDecodeError):
            return Holder(**orjson.loads(path.read_bytes()))
        time.sleep(_WRITE_SECONDS)
    return None


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Make a file and hold its lock as long as the block lasts; the file is deleted afterwards.

    Yields False, and holds nothing, if another process has it.
    """
    while True:
        file = open(path, "ab")  # noqa: SIM115  # closed below
        if not try_lock(file):
            file.close()
            yield False
            return
        if is_linked(file, path):
            break
        file.close()  # its holder has just ended and deleted the file
    try:
        write_holder(file)
        yield True
    finally:
        if is_linked(file, path):
            path.unlink()
        file.close()
