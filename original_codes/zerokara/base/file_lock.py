"""File locks that the kernel releases when their process ends, however it ends (flock(2)), with their holder's name.

`filelock` does not fit: it leaves its file behind, names no holder, and refuses a file system without locks. The file
is always open for writing: NFS implements the lock as a byte-range lock, which it refuses for a folder and for a file
that is open for reading only.
"""

import errno
import fcntl
import os
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

import orjson
import psutil

from zerokara.base.durable import made_folder
from zerokara.base.errors import Fault, UserError

_files: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [file.close() for file in _files])  # a lock ends with its last open file


class Holder(NamedTuple):
    """The process that holds a lock, as it wrote itself into the file."""

    pid: int
    host: str

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"process {self.pid}" + ("" if self.is_here else f" on {self.host}")


@contextmanager
def held(path: Path, seconds: float = 0.0) -> Iterator[bool]:
    """Make a file and hold its lock as long as the block lasts; the file is deleted afterwards.

    Yields False, and holds nothing, if another process still has it after `seconds`; one that has ended is waited for.
    """
    is_running, holder = False, read_holder(path)
    if holder and holder.is_here:
        with suppress(psutil.NoSuchProcess):
            is_running = psutil.Process(holder.pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        if not is_running:
            seconds = max(seconds, 30.0)  # the kernel cleans up behind it, for long where its threads wait for a core
    deadline = time.monotonic() + seconds
    while not (file := _locked(path)) and time.monotonic() < deadline:
        time.sleep(0.02)
    try:
        yield file is not None
    finally:
        if file:
            if _is_linked(file, path):  # the folder may have been moved, and another be in its place
                path.unlink()
            file.close()


@contextmanager
def claimed(path: Path, output: Path) -> Iterator[None]:
    """Make the folder of a lock if it does not exist, and hold the lock as long as the block writes `output`.

    Raises UserError if another process holds it.
    """
    with made_folder(path.parent), held(path) as is_ours:
        if not is_ours:
            rule = f"{read_holder(path) or 'another process'} is writing here"
            raise UserError(Fault(str(output), rule, remedy="wait until it ends, or choose another output"))
        yield


def read_holder(path: Path) -> Holder | None:
    """Return the process that holds the lock of a file; None if unknown (it writes itself after locking)."""
    with suppress(FileNotFoundError, orjson.JSONDecodeError, TypeError):
        return Holder(**orjson.loads(path.read_bytes()))
    return None


def _locked(path: Path) -> IO[bytes] | None:
    """Lock a file, and write this process into it; None if another process has locked it."""
    file = open(path, "ab")  # noqa: SIM115  # held open on purpose
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError as error:
        # NFS without its lock daemon, Lustre without `flock`, some FUSE.
        if error.errno not in {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}:
            error.filename = str(path)
            raise
        print(
            f"{path.parent}: this file system has no locks ({error.strerror}): make sure that no second command works "
            "here at the same time, or mount it with locks (Lustre: flock; NFS: without nolock)",
            flush=True,
        )
    if not _is_linked(file, path):  # its holder has just ended and deleted it, and another file may have the name
        file.close()
        return _locked(path)
    if (left := read_holder(path)) and not left.is_here:
        unclear = "has not ended cleanly, or runs, and this file system has locks within one machine alone"
        print(f"{path.parent}: {left} {unclear}: make sure that it is gone", flush=True)
    file.truncate(0)
    file.write(orjson.dumps(Holder(os.getpid(), socket.gethostname())._asdict()))
    file.flush()
    _files.add(file)
    return file


def _is_linked(file: IO[bytes], path: Path) -> bool:
    """Tell whether an open file has the name `path`."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False
