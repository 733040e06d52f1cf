"""Atomic files and folders: they appear complete or not at all, and survive a power cut.

Each is written under a temporary name in the same folder, synced to disk, and renamed, which is atomic within one file
system (POSIX ``rename``). A symbolic link is followed: its target is written.
"""

import errno
import glob
import itertools
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import orjson

from zerokara.base.errors import NO_ROOM, Fault, UserError

PARTIAL_SUFFIX = ".partial"  # of an unfinished file or folder; a leftover with it may be deleted
_OLD_SUFFIX = f".old{PARTIAL_SUFFIX}"
DELETED_SUFFIX = f".deleted{PARTIAL_SUFFIX}"
ASIDE_ENDING = ".old-"  # with a number, of a file or folder that was replaced and is kept


def sync_folder(path: Path) -> None:
    """Sync a folder, so that renames inside it survive a power cut; or the content of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:  # CIFS and FUSE cannot sync a folder
            error.filename = str(path)
            raise
    finally:
        os.close(descriptor)


def make_folders(path: Path) -> list[Path]:
    """Make a folder and its parents, synced; return those that are new, the innermost first."""
    new = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in new:
        sync_folder(each.parent)
    return new


@contextmanager
def made_folder(path: Path) -> Iterator[None]:
    """Make a folder and its parents; at the end of the block remove those that are new and empty."""
    new = make_folders(path)
    try:
        yield
    finally:
        with suppress(OSError):  # a folder is not empty, nor are its parents
            for folder in new:
                folder.rmdir()


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a binary file that gets the name `path` when the block ends without an error.

    A file that it replaces passes on its permissions. The error of a full disk names the file.
    """
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    make_folders(path.parent)
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    try:
        with open(partial, "wb") as file:
            with suppress(OSError):  # there is none, or a file system without permissions
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in {None, *NO_ROOM}:  # numpy has no number for half a write
            number = error.errno or errno.ENOSPC
            raise OSError(number, os.strerror(number), error.filename or str(path)) from error
        raise


@contextmanager
def atomic_folder(path: Path, keep: str = "") -> Iterator[Path]:
    """Yield a temporary folder that gets the name `path` when the block ends without an error.

    An existing folder stays until the new one is complete; then it is renamed to `unused_name` with the ending `keep`,
    or deleted if `keep` is empty. (Between the two renames nothing has the name; `recover` mends that.)
    """
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    make_folders(path.parent)
    recover(path)
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    old = unused_name(path, keep) if keep else path.with_name(path.name + _OLD_SUFFIX)
    try:
        yield partial
        for each in (*partial.rglob("*"), partial):
            sync_folder(each)
        if path.exists():
            os.rename(path, old)
        os.rename(partial, path)
        sync_folder(path.parent)
    finally:
        if old.exists() and not path.exists():
            os.rename(old, path)
        shutil.rmtree(partial, ignore_errors=True)
        recover(path)  # which deletes what was replaced and is not to be kept


def recover(path: Path) -> None:
    """Restore the name of a folder whose replacement was interrupted between two renames."""
    old = path.with_name(path.name + _OLD_SUFFIX)
    if old.exists() and not path.exists():
        os.rename(old, path)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Delete a folder or a file; of a link to a folder, the content. Also delete what an interrupted call has left.

    A folder is renamed first, so that no half of it has its name.
    """
    going = path.with_name(path.name + DELETED_SUFFIX)
    shutil.rmtree(going, ignore_errors=True)
    if path.is_symlink() and path.is_dir():
        target = Path(os.path.realpath(path))
        remove_folder(target)
        target.mkdir()
    elif path.is_dir():
        with suppress(OSError):  # on NFS a file that is still open keeps the folder of an earlier deletion
            path = path.rename(going)
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def unused_name(path: Path, ending: str) -> Path:
    """Return a name that does not exist: `path` with an ending, and a number if needed (``run.old-1``)."""
    first, dash = ("1", "") if ending.endswith("-") else ("", "-")
    numbers = itertools.chain([first], (f"{dash}{number}" for number in itertools.count(2)))
    names = (path.with_name(f"{path.name}{ending}{number}") for number in numbers)
    return next(name for name in names if not os.path.lexists(name))


def beside(path: Path) -> list[Path]:
    """Return what was set aside in the place of `path`, and is kept: ``run.old-1``, ``run.old-2``."""
    return sorted(path.parent.glob(f"{glob.escape(path.name + ASIDE_ENDING)}*"))


def write_file(path: Path, content: bytes | str) -> None:
    """Write a whole file at once; a text in UTF-8."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, content: object) -> None:
    """Write indented UTF-8 JSON at once."""
    write_file(path, orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def read_back(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object that `write_json` wrote. Raises UserError with the remedy if the file is damaged."""
    with suppress(ValueError):
        if isinstance(content := orjson.loads(path.read_bytes()), dict):
            return content
    raise UserError(Fault(str(path), "is damaged: it holds no JSON object", remedy=remedy))
