"""SHA-256 of files: of one, of many by threads, and of many while other work goes on."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType

from zerokara.errors import shown
from zerokara.progress import Progress
from zerokara.resources import available_cores

MAX_THREADS = 8
SILENT_SECONDS = 0.5
"""Hashing that is done so soon shows no progress."""
_PIECE_BYTES = 1024 * 1024
Key = tuple[str, int, int]
"""What a file's content is known by: its absolute path, size and modification time (ns)."""


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Place:
    """A file on a disk."""

    def __init__(self, path: Path):
        status = path.stat()
        self.path = path.resolve()
        self.key = (shown(self.path), status.st_size, status.st_mtime_ns)
        """What its content is known by: its absolute path, size and modification time."""


def hashes(places: list[Place]) -> dict[Key, str]:
    """The SHA-256 of each file, by threads (hashing lets go of the interpreter), with progress when it takes long."""
    if not places:
        return {}
    counter = _Counter()
    # The largest first, so that none is begun when the others end.
    order = sorted(places, key=lambda place: -place.key[1])
    with ThreadPoolExecutor(min(MAX_THREADS, available_cores(), len(order))) as threads:
        futures = {place.key: threads.submit(_counted_sha256, place.path, counter) for place in order}
        try:
            _watch(list(futures.values()), counter, sum(place.key[1] for place in places))
            return {key: future.result() for key, future in futures.items()}
        except BaseException:
            counter.stopped = True  # Ctrl-C must not wait for a hundred gigabytes.
            threads.shutdown(wait=False, cancel_futures=True)
            raise


class BackgroundHashes:
    """The hashes of files, found by a few threads while a step works; `result` waits for them."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._places = places = {place.key: place for place in map(Place, files)}
        self._counter, self._total = _Counter(), sum(place.key[1] for place in places.values())
        # One thread keeps up with some dozen processes at work on the same text.
        self._threads = ThreadPoolExecutor(max(1, available_cores() // 16))
        self._futures = {
            key: self._threads.submit(_counted_sha256, place.path, self._counter)
            for key, place in sorted(places.items())
        }

    def result(self) -> dict[Key, str]:
        """Path, size and modification time of each file as they were at the start, to its hash.

        Raises:
            OSError: a file is gone.
        """
        _watch(list(self._futures.values()), self._counter, self._total)
        return {key: future.result() for key, future in self._futures.items()}

    def by_path(self) -> dict[Path, str]:
        """As `result`, by the absolute path alone."""
        return {self._places[key].path: sha256 for key, sha256 in self.result().items()}

    def __enter__(self) -> BackgroundHashes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._counter.stopped = True
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Counter:
    """Bytes hashed so far, over all threads."""

    def __init__(self) -> None:
        self.done, self.stopped = 0, False
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.done += count


def _counted_sha256(path: Path, counter: _Counter) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while not counter.stopped and (piece := file.read(_PIECE_BYTES)):
            digest.update(piece)
            counter.add(len(piece))
    return digest.hexdigest()


def _watch(futures: list[Future[str]], counter: _Counter, total: int) -> None:
    """Wait for the hashes; whoever waits longer than a moment sees how far they are."""
    waiting = wait(futures, timeout=SILENT_SECONDS, return_when="FIRST_EXCEPTION").not_done
    if not waiting:
        return
    with Progress("checking the input", total, "B") as progress:
        advanced = 0
        while waiting:
            waiting = wait(waiting, timeout=0.2, return_when="FIRST_EXCEPTION").not_done
            progress.advance(counter.done - advanced)
            advanced = counter.done
            if any(future.done() and future.exception() for future in futures):
                return
