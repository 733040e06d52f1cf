"""Accounts of the corpus in documents and bytes, source by source, and the check of `max_bad_fraction`.

Documents: what came in = train + valid + skipped, where every row of a damaged row group is one that was skipped.

Bytes are those of the files on disk (compressed, if they are): the one unit that is known exactly even of what cannot
be read, and that `ls -l` shows. What came in (the sizes of the files) = read + skipped + lost:

* lost could not be read: a packed file from its damage on; of a damaged row group, the share of its missing rows;
* skipped was read and made no document. A line counts with its bytes; in a packed file these are bytes of what it
  unpacks to, so that the part of the file that could be read is shared out in that proportion (a .parquet: in
  proportion to the values of the column; each is one byte longer here, as a line is by its end);
* read is the rest.

Of what was read, some is *unverified*: the gzip member or zstd frame in which a damage was met, for its checksum failed
or was never reached, and a gzip member can unpack to nonsense for long before anything is noticed; and all of a packed
file that ends in the middle, for nobody can know how much is missing. Such documents are used, but these bytes are held
against `max_bad_fraction` as those that were lost.

Everything is summed by file before it is shared out, so it does not depend on how the corpus was cut into tasks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerokara.config.data import DataSettings
from zerokara.corpus.documents import HARMLESS
from zerokara.corpus.find import InputFile
from zerokara.errors import RunError, UserError
from zerokara.progress import bytes_text
from zerokara.tokens.layout import TokenPaths
from zerokara.tokens.shards import RangeResult, ShardResult
from zerokara.tokens.tasks import Task

NAMED_FILES = 5
"""Damaged files named in the summary and in an error; the manifest names `FILES_IN_FACTS`."""
FILES_IN_FACTS = 1000


@dataclass
class SplitTally:
    """Contents of one split."""

    documents: int = 0
    tokens: int = 0
    """Including the end-of-document ids."""
    text_bytes: int = 0
    """UTF-8 bytes of the documents' text."""

    def add(self, lengths: NDArray[np.int32]) -> None:
        """Count documents given as (ids, text bytes)."""
        self.documents += len(lengths)
        self.tokens += int(lengths[:, 0].sum(dtype=np.int64))
        self.text_bytes += int(lengths[:, 1].sum(dtype=np.int64))

    def __add__(self, other: SplitTally) -> SplitTally:
        sums = (self.documents + other.documents, self.tokens + other.tokens, self.text_bytes + other.text_bytes)
        return SplitTally(*sums)


@dataclass(frozen=True)
class DamagedFile:
    """A file of which the end or some row groups could not be read."""

    name: str
    damage: str
    """The first damage that was met."""
    documents: int
    """Documents known to be missing, a lower bound."""
    bytes_lost: int
    file_bytes: int
    bytes_unverified: int

    def __str__(self) -> str:
        parts = [f"{bytes_text(self.bytes_lost)} of {bytes_text(self.file_bytes)} lost"]
        if self.documents > 1:
            parts.append(f"{self.documents:,} documents")
        if self.bytes_unverified:
            parts.append(f"{bytes_text(self.bytes_unverified)} read but unverified")
        return f"{self.name} ({self.damage}: {', '.join(parts)})"


@dataclass
class SourceTally:
    """Documents and bytes of one source, or of all; the top of this file says what adds up to what."""

    documents_in: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Documents, by reason."""
    bytes_in: int = 0
    bytes_read: int = 0
    bytes_skipped: Counter[str] = field(default_factory=Counter)
    bytes_lost: int = 0
    bytes_unverified: int = 0
    """Of those read."""
    damaged: list[DamagedFile] = field(default_factory=list)
    train: SplitTally = field(default_factory=SplitTally)
    valid: SplitTally = field(default_factory=SplitTally)

    @property
    def documents(self) -> int:
        """Documents with text, in both splits."""
        return self.documents_in - self.skipped.total()

    @property
    def bad_documents(self) -> tuple[int, int]:
        """Bad documents, and all documents; empty lines count in neither."""
        harmless = sum(self.skipped[reason] for reason in HARMLESS)
        return self.skipped.total() - harmless, self.documents_in - harmless

    @property
    def bad_bytes(self) -> tuple[int, int]:
        """Bad bytes, and all bytes; empty lines count in neither."""
        harmless = sum(self.bytes_skipped[reason] for reason in HARMLESS)
        bad = self.bytes_skipped.total() - harmless + self.bytes_lost + self.bytes_unverified
        return bad, self.bytes_in - harmless

    def facts(self) -> dict[str, Any]:
        """All counts but the splits, as JSON values."""
        return {
            "documents_in": self.documents_in,
            "skipped": dict(self.skipped.most_common()),
            "bytes_in": self.bytes_in,
            "bytes_read": self.bytes_read,
            "bytes_skipped": dict(self.bytes_skipped.most_common()),
            "bytes_lost": self.bytes_lost,
            "bytes_unverified": self.bytes_unverified,
            "damaged_files": len(self.damaged),
            "damaged": self.damaged[:FILES_IN_FACTS],
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> SourceTally:
        """Restore a tally from `facts`."""
        numbers = ("documents_in", "bytes_in", "bytes_read", "bytes_lost", "bytes_unverified")
        return cls(
            skipped=Counter(facts["skipped"]),
            bytes_skipped=Counter(facts["bytes_skipped"]),
            damaged=[DamagedFile(**file) for file in facts["damaged"]],
            **{name: facts[name] for name in numbers},
        )


def count_sources(num_sources: int, tasks: Sequence[Task], results: Mapping[str, ShardResult]) -> list[SourceTally]:
    """Count every source, except for the splits; `tasks` are all tasks in corpus order.

    Raises:
        RunError: a plain file's lines do not add up to the file, which is a bug.
    """
    tallies = [SourceTally() for _ in range(num_sources)]
    parts = (part for task in tasks for part in zip(task.ranges, results[task.name].ranges, strict=True))
    for _, of_file in groupby(parts, lambda part: part[0].file.name):
        ranges, held = zip(*of_file, strict=True)
        _add_file(tallies[ranges[0].file.source], ranges[0].file, held)
    return tallies


def total(tallies: Sequence[SourceTally]) -> SourceTally:
    """All sources together."""
    whole = SourceTally()
    for tally in tallies:
        for one in fields(tally):
            setattr(whole, one.name, getattr(whole, one.name) + getattr(tally, one.name))
    return whole


def _add_file(tally: SourceTally, file: InputFile, held: Sequence[RangeResult]) -> None:
    """Count one file, by what its ranges held."""
    unpacked = sum(part.bytes for part in held)
    if unpacked != file.bytes and file.format != "parquet" and not file.is_packed:
        raise RunError(f"{unpacked:,} of the {file.bytes:,} bytes of {file.name} were counted: a bug in zerokara")
    skipped = sum((part.skipped_bytes for part in held), Counter[str]())
    damages = [damage for part in held for damage in part.damages]
    lost = sum(damage.lost_bytes for damage in damages)
    readable = file.bytes - lost
    on_disk = Counter({reason: readable * size // max(1, unpacked) for reason, size in skipped.items()})
    read = readable - on_disk.total()
    unverified = read * sum(damage.unverified_bytes for damage in damages) // max(1, readable)
    for part in held:
        tally.documents_in += part.lines
        tally.skipped += part.skipped
    tally.bytes_in += file.bytes
    tally.bytes_read += read
    tally.bytes_skipped += on_disk
    tally.bytes_lost += lost
    tally.bytes_unverified += unverified
    if damages:
        documents = sum(damage.documents for damage in damages)
        tally.damaged.append(DamagedFile(file.name, damages[0].what, documents, lost, file.bytes, unverified))


def check_bad_fraction(config: DataSettings, tally: SourceTally, paths: TokenPaths) -> None:
    """Check the shares of bad documents and of bad bytes among all that are not merely empty lines.

    Raises:
        UserError: either is above `max_bad_fraction`; names both, the counts by reason, the damaged files and the
            quarantine file.
    """
    limit, counted = config.max_bad_fraction, (tally.bad_documents, tally.bad_bytes)
    if all(bad <= limit * among for bad, among in counted):
        return
    (bad, among), (bad_bytes, among_bytes) = counted
    shares = [bad / max(1, among), bad_bytes / max(1, among_bytes)]
    rule = (
        f"{bad:,} of {among:,} documents are bad ({shares[0]:.3g} of them), and {bad_bytes:,} of {among_bytes:,} bytes "
        f"on the disk ({shares[1]:.3g}): {reasons_text(tally.skipped)}"
    )
    enough = math.ceil(max(shares) * 1000) / 1000
    remedy = f"{see(paths, tally.skipped)}; repair the corpus, or set max_bad_fraction to {enough:g}"
    if tally.damaged:
        rule += f"; damaged: {damaged_text(tally.damaged)}"
    if tally.bytes_unverified:
        remedy = f"download the damaged files again (unverified bytes count as bad); {remedy}"
    raise UserError(config.fault("max_bad_fraction", rule, remedy))


def reasons_text(skipped: Counter[str]) -> str:
    """``broken JSON 12, empty text 3``."""
    return ", ".join(f"{reason} {count:,}" for reason, count in skipped.most_common())


def damaged_text(damaged: Sequence[DamagedFile]) -> str:
    """The first few of the damaged files with what was lost of each, and how many more there are."""
    named = ", ".join(str(file) for file in damaged[:NAMED_FILES])
    more = len(damaged) - NAMED_FILES
    return f"{named}, and {more:,} more" if more > 0 else named


def see(paths: TokenPaths, skipped: Counter[str]) -> str:
    """Text that names the quarantine file."""
    return f"each is listed in {paths.quarantine}" if skipped else ""
