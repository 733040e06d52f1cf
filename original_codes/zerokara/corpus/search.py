"""A folder or a pattern → the corpus files there, symbolic links followed, each folder and each file once.

A file has the name under which it really lies where that is among those found, else the first, by path, that a link
gives it. What must not be ignored silently is listed too: dangling links, folders that cannot be read, links to files
that were found already, and pipes, sockets and devices with a corpus file's name (opening a pipe would wait for ever).
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from zerokara.durable import PARTIAL_SUFFIX


class FileSearch:
    """The files of one entry whose names are wanted (`is_wanted`), and what else was met on the way."""

    def __init__(self, is_wanted: Callable[[str], bool], is_suspect: Callable[[str], bool]):
        """`is_suspect` picks, among the names that are not wanted, those that a user may have meant to include."""
        self.found: dict[str, Path] = {}
        """Real path → the path by which the file was reached."""
        self.num_repeats = 0
        """Links to files and folders that were found under another name."""
        self.dangling: list[Path] = []
        """Dangling links, whatever their names."""
        self.not_files: dict[str, Path] = {}
        """Real path → path of pipes, sockets and devices with the name of a corpus file."""
        self.unreadable: list[tuple[Path, str]] = []
        """Folders and links that could not be read, and why."""
        self.suspects: list[Path] = []
        self._is_wanted, self._is_suspect = is_wanted, is_suspect
        self._folders: set[str] = set()
        """Real paths of the folders read so far."""
        self._links: set[Path] = set()

    def below(self, folder: Path) -> None:
        """Find the files in a folder and below, except in folders in which a step is at work."""
        self._walk(folder, os.path.realpath(folder))
        self._follow_links()

    def matching(self, pattern: str) -> None:
        """Find the files that a pattern (`glob.glob`'s, recursive) matches, and those in the folders that it does."""
        real_folder = cache(os.path.realpath)

        def real_path(path: Path) -> str:
            if path.name in ("", ".."):
                return os.path.realpath(path)
            return os.path.join(real_folder(str(path.parent)), path.name)

        try:
            matches = [(real_path(path), path) for path in map(Path, _matches(pattern)) if not _is_unfinished(path)]
        except OSError as error:
            self.unreadable.append((Path(error.filename), error.strerror or str(error)))
            return
        # A file's own place goes before a path through a linked folder.
        matches.sort(key=lambda match: (match[0] != os.path.abspath(match[1]), match[1]))
        for real, path in matches:
            if path.is_symlink():
                self._links.add(path)
            elif path.is_dir():
                self._walk(path, real)
            else:
                self._take(path, real, path.is_file())
        self._follow_links()

    def _walk(self, folder: Path, real: str) -> None:
        """Take all files of a folder and below; leave links for later."""
        waiting = [(str(folder), real)]
        while waiting:
            path, real = waiting.pop()
            if real in self._folders:
                continue
            self._folders.add(real)
            try:
                with os.scandir(path) as entries:
                    for entry in entries:
                        if entry.is_symlink():
                            self._links.add(Path(entry.path))
                        elif entry.is_dir() and not entry.name.endswith(PARTIAL_SUFFIX):
                            waiting.append((entry.path, os.path.join(real, entry.name)))
                        else:
                            self._take(Path(entry.path), os.path.join(real, entry.name), entry.is_file())
            except OSError as error:
                self.unreadable.append((Path(path), error.strerror or str(error)))

    def _follow_links(self) -> None:
        """Follow the links, once everything else has been found; they may lead to further links."""
        while self._links:
            links, self._links = sorted(self._links), set()
            for link in links:
                try:
                    real, mode = os.path.realpath(link), os.stat(link).st_mode
                except PermissionError as error:
                    self.unreadable.append((link, error.strerror or str(error)))
                except OSError:  # dangling, or a circle
                    self.dangling.append(link)
                else:
                    if not stat.S_ISDIR(mode):
                        self._take(link, real, stat.S_ISREG(mode))
                    elif real in self._folders:
                        self.num_repeats += 1
                    else:
                        self._walk(link, real)

    def _take(self, path: Path, real: str, is_file: bool) -> None:
        if not self._is_wanted(path.name):
            self.suspects += [path] if self._is_suspect(path.name) else []
        elif not is_file:
            self.not_files.setdefault(real, path)
        elif self.found.setdefault(real, path) != path:
            self.num_repeats += 1


def _is_unfinished(path: Path) -> bool:
    return any(part.endswith(PARTIAL_SUFFIX) for part in path.parts)


def _matches(pattern: str) -> Iterator[str]:
    """The matches of a recursive pattern.

    `glob.glob` follows a circle of links until the path is too long, and with two such circles never ends.
    """
    parts = pattern.split("/")
    if "**" not in parts:
        yield from glob.glob(pattern)
        return
    place = parts.index("**")
    before, after = "/".join(parts[:place]) or ("/" if place else "."), "/".join(parts[place + 1 :])
    for start in glob.glob(os.path.join(before, "")):
        for folder in _folders(start, (os.path.realpath(start),)):
            yield from _matches(os.path.join(glob.escape(folder), after)) if after else [folder]


def _folders(folder: str, real_above: tuple[str, ...]) -> Iterator[str]:
    """A folder and those below that are not hidden, by links too, unless they lead to one that lies above."""
    yield folder
    if os.path.isdir(folder):
        os.scandir(folder).close()  # Raises where glob would silently skip the folder.
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*", ""))):
            real = os.path.realpath(path)
            if real not in real_above:
                yield from _folders(path, (*real_above, real))
