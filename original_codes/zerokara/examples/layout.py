"""The paths of prepared examples: every name that derives from `output_prefix`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zerokara.durable import PARTIAL_SUFFIX

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")


@dataclass(frozen=True)
class ExamplePaths:
    """Paths of one `output_prefix`."""

    output_prefix: str

    def prefix(self, split: Split) -> Path:
        """Prefix of the .bin and .idx of a split."""
        return Path(f"{self.output_prefix}_{split}")

    def records(self, split: Split) -> Path:
        """The texts of a split's examples, as JSON lines in the order of its token files; not of train."""
        return Path(f"{self.output_prefix}_{split}_examples.jsonl")

    @property
    def quarantine(self) -> Path:
        """The bad lines, as JSON lines; exists only if there are any."""
        return Path(f"{self.output_prefix}_quarantine.jsonl")

    @property
    def manifest(self) -> Path:
        """The manifest, written last."""
        return Path(f"{self.output_prefix}_examples.manifest.json")

    @property
    def lock(self) -> Path:
        """The lock of a process that writes here."""
        return Path(f"{self.output_prefix}_examples.lock{PARTIAL_SUFFIX}")
