"""SHA-256 of files: of one, of many by threads, and of many while other work runs."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from zerokara.errors import shown
from zerokara.progress import Progress
from zerokara.resources import available_cores

MAX_THREADS = 8
QUIET_SECONDS = 0.5
"""Hashing that takes no longer shows no progress."""
_CHUNK_BYTES = 1024 * 1024


class FileKey(NamedTuple):
    """What tells one version of a file from another without reading it."""

    path: str
    """Absolute, as `shown` spells it."""
    bytes: int
    modified_ns: int


def file_key(path: Path) -> FileKey:
    """Key of a file as it is now."""
    status = path.stat()
    return FileKey(shown(path.resolve()), status.st_size, status.st_mtime_ns)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(files: Sequence[Path]) -> dict[FileKey, str]:
    """SHA-256 of each file, by as many threads as there are cores; shows progress if it takes long.

    Raises:
        OSError: a file cannot be read.
    """
    largest_first = sorted(files, key=lambda path: -path.stat().st_size)  # so that all threads end together
    with BackgroundHashes(largest_first, min(MAX_THREADS, available_cores())) as hashes:
        return hashes.result()


class BackgroundHashes:
    """Hashes files by threads while other work runs (hashing releases the interpreter's lock); a context manager."""

    def __init__(
        self,
        files: Sequence[Path],
        num_threads: int | None = None,
        known: Mapping[FileKey, str] | None = None,
        on_hash: Callable[[FileKey, str], None] | None = None,
    ) -> None:
        """Start. By default one thread for 16 cores, which keeps up with workers that encode the same text.

        What is `known` is not read; `on_hash` hears of every other one, in the thread that has hashed it.
        """
        self._done_bytes, self._stopped, self._lock = 0, False, threading.Lock()
        self._threads = ThreadPoolExecutor(num_threads or max(1, available_cores() // 16))
        self._on_hash, known = on_hash, known or {}
        paths = {file_key(path): path for path in files}
        self._known = {key: known[key] for key in paths if key in known}
        self._futures = {
            key: self._threads.submit(self._sha256, key, path) for key, path in paths.items() if key not in known
        }

    def result(self) -> dict[FileKey, str]:
        """Wait for the SHA-256 of each file, by its key at the start; shows progress if it takes long.

        Raises:
            OSError: a file cannot be read.
        """
        futures = self._futures.values()
        waiting = wait(futures, timeout=QUIET_SECONDS, return_when="FIRST_EXCEPTION").not_done
        if waiting:
            with Progress("checking files", sum(key.bytes for key in self._futures), "B") as progress:
                shown_bytes = 0
                while waiting and not any(future.done() and future.exception() for future in futures):
                    waiting = wait(waiting, timeout=0.2, return_when="FIRST_EXCEPTION").not_done
                    progress.advance(self._done_bytes - shown_bytes)
                    shown_bytes = self._done_bytes
        return self._known | {key: future.result() for key, future in self._futures.items()}

    def _sha256(self, key: FileKey, path: Path) -> str:
        digest = hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            while not self._stopped and (chunk := file.read(_CHUNK_BYTES)):
                digest.update(chunk)
                with self._lock:
                    self._done_bytes += len(chunk)
        if self._on_hash and not self._stopped:
            with self._lock:
                self._on_hash(key, digest.hexdigest())
        return digest.hexdigest()

    def __enter__(self) -> BackgroundHashes:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True  # Ctrl-C must not wait for a hundred gigabytes
        self._threads.shutdown(wait=False, cancel_futures=True)
