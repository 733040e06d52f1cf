"""Atomic files and folders: they appear complete or not at all, and survive a power cut.

Each is written under a temporary name in the same folder, synced to disk, and renamed; a rename within one file system
is atomic (POSIX ``rename``), so that a reader never sees half a file, whenever the writer dies. A folder that is
replaced changes names with the new one in one step (Linux ``renameat2``, RENAME_EXCHANGE), so that a complete one has
the name at every moment. A symbolic link is followed: its target is written.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import itertools
import os
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO

import orjson

PARTIAL_SUFFIX = ".partial"
"""Ending of the name of what is being written; a leftover with it may be deleted."""
ASIDE_ENDING = ".old-"
"""Appended, with a number, to the name of what was replaced and is kept."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""<fcntl.h> and <linux/fs.h>."""
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Error numbers of a write for which there is no room."""
_NOT_SUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
"""Error numbers of a file system that cannot exchange names (NFS, FUSE), or cannot sync a folder (CIFS, FUSE)."""


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that renames inside it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            error.filename = str(folder)
            raise
    finally:
        os.close(descriptor)


def make_folders(folder: Path) -> list[Path]:
    """Make a folder and its parents, synced; return those that are new, the innermost first."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in new:
        sync_folder(each.parent)
    return new


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a binary file that gets the name `path` when the block ends without an error.

    A file that it replaces passes on its permissions.
    """
    path = _followed(path)
    make_folders(path.parent)
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    try:
        with _naming_full_disk(path), open(partial, "wb") as file:
            if path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def _naming_full_disk(path: Path) -> Iterator[None]:
    """Let the error of a full disk name the file: Python's own, of a write, names none."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM and error.filename is None:
            error.filename = str(path)
        raise


def remove_partials(path: Path) -> None:
    """Remove what killed processes left of the file `path`; nobody may be writing it now."""
    path = _followed(path)
    for partial in path.parent.glob(f"{glob.escape(path.name)}.*{PARTIAL_SUFFIX}"):
        if partial.name.removeprefix(f"{path.name}.").removesuffix(PARTIAL_SUFFIX).isdigit():
            partial.unlink(missing_ok=True)


def unused_name(path: Path, ending: str) -> Path:
    """A name that does not exist: `path` with an ending, and a number if needed (``run.old-1``, ``x.failed``)."""
    first = 1 if ending.endswith("-") else 2
    numbered = (f"{ending.removesuffix('-')}-{number}" for number in itertools.count(first))
    endings = numbered if ending.endswith("-") else itertools.chain([ending], numbered)
    names = (path.with_name(path.name + each) for each in endings)
    return next(name for name in names if not os.path.lexists(name))


@contextmanager
def atomic_folder(path: Path, keep: str = "") -> Iterator[Path]:
    """Yield a temporary folder that gets the name `path` when the block ends without an error.

    An existing folder of that name stays until the new one is complete; then it is renamed to `unused_name` with the
    ending `keep`, or deleted if `keep` is empty.
    """
    path = _followed(path)
    make_folders(path.parent)
    recover(path)
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    is_placed = False
    try:
        yield partial
        for file in sorted(partial.rglob("*")):
            if file.is_file():
                with open(file, "rb") as opened:
                    os.fsync(opened.fileno())
            else:
                sync_folder(file)
        sync_folder(partial)
        _place(partial, path)
        is_placed = True
        sync_folder(path.parent)
    except BaseException:
        if not is_placed:  # else this is the folder that was replaced, kept until the new name is surely on the disk
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if keep and partial.exists():
        os.rename(partial, unused_name(path, keep))
    shutil.rmtree(partial, ignore_errors=True)


def recover(path: Path) -> None:
    """Restore the name of a folder whose replacement was interrupted between two renames."""
    old = _old_name(path)
    if not old.exists():
        return
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(old, path)


def _followed(path: Path) -> Path:
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _old_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.old{PARTIAL_SUFFIX}")


def _place(partial: Path, path: Path) -> None:
    """Rename `partial` to `path`, and what had that name, if anything, to `partial`."""
    if not path.exists():
        os.rename(partial, path)
        return
    if exchange_names(partial, path):
        return
    old = _old_name(path)
    os.rename(path, old)
    try:
        os.rename(partial, path)
    except BaseException:
        os.rename(old, path)
        raise
    os.rename(old, partial)


def exchange_names(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False if the C library or the file system cannot.

    Raises:
        OSError: the disk fails.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):  # glibc has it since 2.28
        return False
    if not libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        return True
    if (code := ctypes.get_errno()) in _NOT_SUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


@contextmanager
def made_folder(path: Path) -> Iterator[None]:
    """Make a folder and its parents; at the end of the block remove those that are new and empty."""
    new = make_folders(path)
    try:
        yield
    finally:
        with suppress(OSError):  # it is not empty, nor are its parents
            for folder in new:
                folder.rmdir()


class BackgroundSync:
    """Syncs files in a thread while others are still written, so that little is left to wait for; a context manager.

    When its block ends without an error, everything that was handed to it is on the disk.
    """

    def __init__(self) -> None:
        self._disk = ThreadPoolExecutor(1)
        self._waiting: list[Future[None]] = []

    def file(self, descriptor: int, path: Path) -> None:
        """Sync what has been written to an open file so far; the caller may close it at once."""
        self._waiting.append(self._disk.submit(self._sync, os.dup(descriptor), path))

    @staticmethod
    def _sync(descriptor: int, path: Path) -> None:
        try:
            os.fsync(descriptor)
        except OSError as error:
            error.filename = str(path)
            raise
        finally:
            os.close(descriptor)

    def __enter__(self) -> BackgroundSync:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._disk.shutdown()
        if kind is None:
            for each in self._waiting:
                each.result()


def write_bytes(path: Path, content: bytes) -> None:
    """Write a whole file at once."""
    with atomic_file(path) as file:
        file.write(content)


def write_text(path: Path, content: str) -> None:
    """Write a whole UTF-8 file at once."""
    write_bytes(path, content.encode("utf-8"))


def write_json(path: Path, content: object) -> None:
    """Write indented UTF-8 JSON at once."""
    write_bytes(path, orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
