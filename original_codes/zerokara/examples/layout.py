"""The paths of prepared examples: every name that derives from `output_prefix`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zerokara.durable import PARTIAL_SUFFIX
from zerokara.tokens.layout import bin_path, idx_path

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
    def written(self) -> list[Path]:
        """Every file that may be written, but for the lock."""
        tokens = [path_of(self.prefix(split)) for split in SPLITS for path_of in (bin_path, idx_path)]
        return [*tokens, *map(self.records, SPLITS[1:]), self.quarantine, self.manifest]

    @property
    def manifest(self) -> Path:
        """The manifest, written last."""
        return Path(f"{self.output_prefix}_examples.manifest.json")

    @property
    def lock(self) -> Path:
        """The lock of a process that writes here."""
        return Path(f"{self.output_prefix}_examples.lock{PARTIAL_SUFFIX}")
