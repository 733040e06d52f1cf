"""A file of a Hub dataset, as the list of corpus files holds it; what reads it (`hub`) is imported only to read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

PREFIX = "hf://datasets/"


@dataclass(frozen=True)
class HubFile:
    """One file of a dataset, at one commit."""

    dataset: str
    commit: str
    path: str
    bytes: int
    content: str
    """What identifies the content: the SHA-256 of a file outside git, else ``git:`` and the blob id."""

    @property
    def name(self) -> str:
        """The file as an entry may name it."""
        return f"{PREFIX}{self.dataset}@{self.commit}/{self.path}"

    def __str__(self) -> str:
        return self.name

    def open(self, buffer_bytes: int) -> BinaryIO:
        """Open the file as a seekable stream; with `buffer_bytes` 0 it fetches only what it is asked for.

        Raises:
            OSError: from reading, when the network fails for longer than the retries last; names the file.
        """
        from zerokara.corpus import hub  # a second for huggingface_hub: only where an entry names a dataset

        return hub.open_file(self, buffer_bytes)
