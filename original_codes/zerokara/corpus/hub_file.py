"""A file of a Hub dataset, as the list of corpus files holds it; `hub` finds and reads it."""

from __future__ import annotations

from dataclasses import dataclass

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
