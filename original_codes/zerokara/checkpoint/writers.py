"""The processes that write one checkpoint together: the first says where and completes it, each writes its share.

They talk through a store of torch.distributed, by two kinds of keys: ``N``, the N-th request of the first (the name of
the folder to write into, or that no more comes for this checkpoint), and ``N/K``, what process K made of it (its files
with their hashes, or the disk's error). A store and no collectives: all of it happens in a thread, while the training
uses those. The folder goes by its name alone, since a disk that several machines share may be mounted elsewhere.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
from torch import Tensor
from torch.distributed import Store

from zerokara.checkpoint import tensor_file
from zerokara.checkpoint.share import Share
from zerokara.checkpoint.state import OPTIMIZER, WEIGHTS

POLL_SECONDS = 0.05
"""Between two looks for a message."""


@dataclass(frozen=True)
class WrittenFile:
    """One file of a checkpoint, on the disk."""

    name: str
    part: str
    bytes: int
    sha256: str


def write_share(folder: Path, share: Share, tensors: Mapping[str, Mapping[str, Tensor]]) -> list[WrittenFile]:
    """Write this process's rows of each tensor, by part and name, into files of their own; they are on the disk then.

    Raises:
        OSError: the disk is full or cannot be written; names the file.
    """
    written = []
    for part, rows in tensors.items():
        path = folder / share.file_name(part)
        sha256 = tensor_file.write(path, rows)
        if share.count > 1:  # another machine's view of a shared disk is what this one has synced
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        written.append(WrittenFile(path.name, part, path.stat().st_size, sha256))
    return written


class Writers:
    """The processes that write a run's checkpoints, as one of them sees them."""

    def __init__(self, share: Share | None = None, store: Store | None = None):
        """A lone process needs no store."""
        self.share, self._store = share or Share(), store
        self._num_requests = 0
        assert store is not None or self.share.count == 1, "processes that write together talk through a store"

    @contextmanager
    def writing(self, folder: Path) -> Iterator[Callable[[], list[WrittenFile]]]:
        """Let the others write their shares into `folder` while the block lasts; only the first process asks.

        Yields a function that waits for the others, and returns their files in the shares' order; it raises OSError
        where a disk refused one. When the block ends, whether in an error or not, none of them writes any more.
        """
        request = self._request(folder.name)
        heard: list[bytes] = []

        def hear() -> None:
            for index in range(1 + len(heard), self.share.count):
                heard.append(self._wait_for(f"{request}/{index}"))

        def files() -> list[WrittenFile]:
            hear()
            answers = [orjson.loads(each) for each in heard]
            for answer in answers:
                if "error" in answer:
                    raise OSError(*answer["error"])
            return [WrittenFile(**file) for answer in answers for file in answer["files"]]

        try:
            yield files
        finally:
            hear()

    def finish(self) -> None:
        """Tell the others that no request follows for this checkpoint; only the first process does."""
        self._request("")

    def serve(self, run_dir: Path, tensors: Mapping[str, Mapping[str, Tensor]], leave: threading.Event) -> None:
        """Write this process's share as often as the first asks, until it asks no more; all but the first call it.

        It ends at the next wait for a request where `leave` is set: the first may be gone.
        """
        assert self._store is not None
        while True:
            request = str(self._num_requests)
            found = self._wait_for(request, leave)
            if not found:
                return
            self._num_requests += 1
            name = orjson.loads(found)
            if not name:
                return
            try:
                answer: dict[str, object] = {
                    "files": [asdict(file) for file in write_share(run_dir / name, self.share, tensors)]
                }
            except OSError as error:
                answer = {"error": [error.errno, error.strerror or str(error), error.filename or str(run_dir)]}
            self._store.set(f"{request}/{self.share.index}", orjson.dumps(answer).decode())

    def _request(self, name: str) -> str:
        request = str(self._num_requests)
        self._num_requests += 1
        if self._store is not None:
            self._store.set(request, orjson.dumps(name).decode())
        return request

    def _wait_for(self, key: str, leave: threading.Event | None = None) -> bytes:
        """Wait for a message; empty where `leave` was set before it came."""
        assert self._store is not None
        while not self._store.check([key]):
            if leave is not None and leave.wait(POLL_SECONDS):
                return b""
            if leave is None:
                time.sleep(POLL_SECONDS)
        return bytes(self._store.get(key))


def tensors_by_part(weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> dict[str, Mapping[str, Tensor]]:
    """What `write_share` writes, in the order of the files."""
    return {WEIGHTS: weights, OPTIMIZER: moments}
