"""SHA-256 of many files while other work runs; that of one file, and of many by threads, is in `manifest`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zerokara.manifest import FileKey, file_key, hash_files, sha256_of
from zerokara.resources import available_cores

MAX_THREADS = 8
__all__ = ["BackgroundHashes", "FileKey", "file_key", "hash_files", "sha256_of"]


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
        self._threads = ThreadPoolExecutor(num_threads or max(1, available_cores() // 16))
        self._on_hash, self._stopped, known = on_hash, False, known or {}
        paths = {file_key(path): path for path in files}
        self._known = {key: known[key] for key in paths if key in known}
        self._futures = {
            key: self._threads.submit(self._sha256, key, path) for key, path in paths.items() if key not in known
        }

    def result(self) -> dict[FileKey, str]:
        """Wait for the SHA-256 of each file, by its key at the start.

        Raises:
            OSError: a file cannot be read.
        """
        return self._known | {key: future.result() for key, future in self._futures.items()}

    def _sha256(self, key: FileKey, path: Path) -> str:
        sha256 = sha256_of(path)
        if self._on_hash and not self._stopped:
            self._on_hash(key, sha256)
        return sha256

    def __enter__(self) -> BackgroundHashes:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._threads.shutdown(wait=False, cancel_futures=True)
