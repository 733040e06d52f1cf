"""The paths of step 2's files: every name that derives from `output_prefix`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zerokara.durable import PARTIAL_SUFFIX


@dataclass(frozen=True)
class TokenPaths:
    """Paths of one `output_prefix`."""

    output_prefix: str

    @property
    def train(self) -> Path:
        """Prefix of the training documents' .bin and .idx."""
        return Path(f"{self.output_prefix}_text_document")

    @property
    def valid(self) -> Path:
        """Prefix of the validation documents' .bin and .idx."""
        return Path(f"{self.output_prefix}_valid_text_document")

    @property
    def manifest(self) -> Path:
        """The manifest of step 2, written last."""
        return Path(f"{self.output_prefix}_text_document.manifest.json")

    @property
    def quarantine(self) -> Path:
        """The bad lines, as JSON lines; exists only if there are any."""
        return Path(f"{self.output_prefix}_quarantine.jsonl")

    @property
    def work_folder(self) -> Path:
        """Shards while step 2 runs; on the same file system, so that the result can be renamed into place."""
        return Path(f"{self.output_prefix}_tokenizing{PARTIAL_SUFFIX}")

    @property
    def lock(self) -> Path:
        """The lock of a running step 2; beside the work folder, which comes and goes."""
        return Path(f"{self.output_prefix}_tokenizing.lock{PARTIAL_SUFFIX}")

    @property
    def outputs(self) -> list[Path]:
        """The files of both splits and the quarantine, as far as they exist."""
        pairs = [path_of(prefix) for prefix in (self.train, self.valid) for path_of in (bin_path, idx_path)]
        return [path for path in (*pairs, self.quarantine) if path.exists()]


def bin_path(prefix: Path) -> Path:
    """The token ids."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """The index."""
    return prefix.with_name(prefix.name + ".idx")
