"""File locks that the kernel releases when their process ends, however it ends (flock(2)), with their holder's name.

`filelock` does not fit: it leaves its file behind, names no holder, and refuses a file system without locks. The file
is always open for writing: NFS implements the lock as a byte-range lock, which it refuses for a folder and for a file
that is open for reading only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import orjson
import psutil

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""Error numbers of file systems without locks: NFS without its lock daemon, Lustre without ``flock``, some FUSE."""
_PAUSE_SECONDS = 0.02
_DYING_SECONDS = 30.0
"""The kernel cleans up behind a killed process, which takes long where its threads wait for a core."""
_warned: set[Path] = set()
"""Folders whose file system was reported to have no locks."""
_files: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [file.close() for file in _files])  # a lock ends with its last open file


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


def acquire(path: Path, seconds: float = 0.0) -> IO[bytes] | None:
    """Make a file, lock it, and write this process into it; the lock lasts until the returned file is closed.

    Returns None if another process still holds it after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        file = open(path, "ab")  # noqa: SIM115  # held open on purpose
        is_locked = _try_lock(file)
        # Its holder may have just ended and deleted the file: then another file has the name.
        if is_locked and _is_linked(file, path):
            file.truncate(0)
            file.write(orjson.dumps(asdict(Holder(os.getpid(), socket.gethostname()))))
            file.flush()
            _files.add(file)
            return file
        file.close()
        if not is_locked:
            if time.monotonic() >= deadline:
                return None
            time.sleep(_PAUSE_SECONDS)


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Make a file and hold its lock as long as the block lasts; the file is deleted afterwards.

    Yields False, and holds nothing, if another process has it; one that has ended is waited for.
    """
    file = acquire(path, _DYING_SECONDS if _has_ended(read_holder(path)) else 0.0)
    try:
        yield file is not None
    finally:
        if file is not None:
            if _is_linked(file, path):  # the folder may have been moved, and another be in its place
                path.unlink()
            file.close()


def read_holder(path: Path) -> Holder | None:
    """Return the process that holds the lock of a file; None if it is unknown. (It writes itself after locking.)"""
    with suppress(FileNotFoundError, orjson.JSONDecodeError):
        return Holder(**orjson.loads(path.read_bytes()))
    return None


def _has_ended(holder: Holder | None) -> bool:
    """Whether it has ended on this machine, but perhaps for what the kernel has still to clear up."""
    if holder is None or not holder.is_here:
        return False
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(holder.pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return True


def _is_linked(file: IO[bytes], path: Path) -> bool:
    """Whether an open file has the name `path`."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _try_lock(file: IO[bytes]) -> bool:
    """Lock an open file, unless another process has locked it. Without locks it prints a warning and returns True."""
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
