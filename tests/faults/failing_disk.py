"""A failing disk: the ways in which Python code asks the system for a file, and an error at a chosen one of them."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

NAMES = ("open", "rename", "replace", "stat", "listdir", "scandir", "mkdir", "unlink", "rmdir", "fsync", "write")
"""Of the functions of `os`; reading and `builtins.open` come to them."""


@dataclass
class FailingDisk:
    """Counts what is asked of the files below a folder, and lets one request fail, or all of one file from there on."""

    folder: Path
    at: int = -1
    """Number of the request that fails, counted from 0; none where it is negative."""
    errno: int = 0
    lasting: bool = False
    """Whether all later requests about the same file fail too, until `heal`."""
    asked: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    failed: str = ""
    """The request that failed: its kind and the file's name."""
    _bad: str = ""

    def heal(self) -> None:
        """Let requests about the file that failed succeed again."""
        self._bad, self.at = "", -1 if self.failed else self.at

    def ask(self, kind: str, path: object) -> None:
        """Count a request; `path` may be a descriptor.

        Raises:
            OSError: it is the one that fails.
        """
        name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)  # type: ignore[call-overload]
        if not str(name).startswith(f"{self.folder}"):
            return
        self.asked += 1
        self.kinds[kind] += 1
        if self.asked - 1 == self.at or (self.lasting and name == self._bad):
            self._bad = self._bad or str(name)
            self.failed = self.failed or f"{kind} {Path(str(name)).relative_to(self.folder)}"
            raise OSError(self.errno, os.strerror(self.errno), str(name))

    @contextlib.contextmanager
    def inserted(self) -> Iterator[None]:
        """Let this process use the disk, as long as the block lasts; what is synced is only counted."""
        with contextlib.ExitStack() as patches:
            for name in NAMES:
                real = (lambda descriptor: None) if name == "fsync" else getattr(os, name)
                patches.enter_context(mock.patch.object(os, name, self._asking(name, real)))
            for module in (builtins, io):
                patches.enter_context(mock.patch.object(module, "open", self._opening(io.open)))
            yield

    def _asking(self, kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def asking(path: Any, *arguments: Any, **named: Any) -> Any:
            above = named.get("dir_fd")
            self.ask(kind, path if above is None else os.path.join(os.readlink(f"/proc/self/fd/{above}"), path))
            return real(path, *arguments, **named)

        return asking

    def _opening(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opening(path: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
            if isinstance(path, int):
                return real(path, mode, *arguments, **named)
            self.ask("open", path)
            return _File(real(path, mode, *arguments, **named), os.fspath(path), self)

        return opening


class _File:
    """A file whose reading may fail."""

    def __init__(self, file: Any, path: str, disk: FailingDisk):
        self._file, self._path, self._disk = file, path, disk

    def read(self, *arguments: Any) -> Any:
        self._disk.ask("read", self._path)
        return self._file.read(*arguments)

    def readinto(self, buffer: Any) -> Any:
        self._disk.ask("read", self._path)
        return self._file.readinto(buffer)

    def write(self, content: Any) -> Any:
        self._disk.ask("write", self._path)
        return self._file.write(content)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
