"""Files and folders that appear whole or not at all.

Each is written under a temporary name in the same folder, synced to disk, and renamed into place; a rename within one
file system is atomic (POSIX ``rename``), so a reader never meets half a file, whenever the writer dies.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import orjson

PARTIAL_SUFFIX = ".partial"
"""Ending of names that are being written; whatever bears it may be deleted."""


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def appearing_file(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a file that takes the name `path` only when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    try:
        with open(partial, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def appearing_folder(path: Path) -> Iterator[Path]:
    """Give a temporary folder that takes the name `path` when the block ends without an error.

    An existing folder of that name is replaced, and is there until the new one is whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        for file in sorted(partial.rglob("*")):
            if file.is_file():
                with open(file, "rb") as opened:
                    os.fsync(opened.fileno())
            else:
                sync_folder(file)
        sync_folder(partial)
        if path.exists():
            old = path.with_name(f"{path.name}.old{PARTIAL_SUFFIX}")
            shutil.rmtree(old, ignore_errors=True)
            os.rename(path, old)
            os.rename(partial, path)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(partial, path)
        sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def made_folder(path: Path) -> Iterator[None]:
    """Make a folder and those above it; after an error those that are new, and empty, are gone again."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with suppress(OSError):  # it is not empty, nor are those above
            for folder in new:
                folder.rmdir()
        raise


class SyncAhead:
    """Sends to the disk what is written while the work goes on, so that little is left to wait for at its end.

    A context manager: where its block ends without an error, all that was handed to it is on the disk.
    """

    def __init__(self) -> None:
        self._disk = ThreadPoolExecutor(1)
        self._waiting: list[Future[None]] = []

    def file(self, descriptor: int, path: Path) -> None:
        """Send what stands in an open file by now; whoever opened it may close it at once."""
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

    def __enter__(self) -> SyncAhead:
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
    with appearing_file(path) as file:
        file.write(content)


def write_text(path: Path, content: str) -> None:
    """Write a whole UTF-8 file at once."""
    write_bytes(path, content.encode("utf-8"))


def write_json(path: Path, content: object) -> None:
    """Write indented UTF-8 JSON at once."""
    write_bytes(path, orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
