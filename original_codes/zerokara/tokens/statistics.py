"""Statistics of every document, source by source: counts, the quarantine, and the check of `max_bad_fraction`.

Documents: what came in = train + valid + skipped, where every row of a damaged row group is one that was skipped.

Bytes are those of the files on disk (compressed, if they are), and matter only where something cannot be counted in
documents. *Lost* bytes could not be read: a compressed file from its damage on; of a damaged row group, the share of
its missing rows; a line that is too long. *Unverified* bytes were read, and their documents are used, but they count
against `max_bad_fraction` as lost ones do: the gzip member or zstd frame in which a damage was met, for its checksum
failed or was never reached (a gzip member can unpack to nonsense for long before anything is noticed); and all of a
compressed file that ends in the middle, for nobody can know how much is missing.

The quarantine lists every line that makes no document, one JSON object a line: ``file``, ``line`` (from 1; a row of a
.parquet), ``offset`` (byte in the unpacked file; index of the row), ``reason``, ``excerpt``, ``bytes``; of a damage
``documents`` and ``bytes_lost``, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson

from zerokara.config.data import DataSettings
from zerokara.corpus.documents import HARMLESS
from zerokara.corpus.read import Block, Range
from zerokara.durable import atomic_file
from zerokara.errors import UserError
from zerokara.progress import bytes_text, first_of
from zerokara.tokens.indexed import TokenPaths
from zerokara.tokens.shards import RangeResult, ShardResult, ShardTask, shard_path

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

    def __add__(self, other: SplitTally) -> SplitTally:
        sums = (self.documents + other.documents, self.tokens + other.tokens, self.text_bytes + other.text_bytes)
        return SplitTally(*sums)


@dataclass(frozen=True)
class DamagedFile:
    """A file of which the end or some row groups could not be read; `damage` is the first that was met."""

    name: str
    damage: str
    documents: int
    """Number of documents known to be missing, a lower bound."""
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
    """Documents of one source, or of all, and bytes of its files; the top of this file says what adds up to what."""

    documents_in: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Number of documents by reason."""
    bytes_in: int = 0
    bytes_lost: int = 0
    bytes_unverified: int = 0
    damaged: list[DamagedFile] = field(default_factory=list)
    train: SplitTally = field(default_factory=SplitTally)
    valid: SplitTally = field(default_factory=SplitTally)

    @property
    def documents(self) -> int:
        """Number of documents with text, in both splits."""
        return self.documents_in - self.skipped.total()

    @property
    def reasons(self) -> str:
        """``broken JSON 12, empty text 3``."""
        return ", ".join(f"{reason} {count:,}" for reason, count in self.skipped.most_common())

    @property
    def damages(self) -> str:
        """The first few damaged files with the loss of each, and the number of others."""
        return first_of([*map(str, self.damaged)], NAMED_FILES)

    def facts(self) -> dict[str, Any]:
        """All counts, for the manifest."""
        skipped, damaged = dict(self.skipped.most_common()), self.damaged[:FILES_IN_FACTS]
        return {**vars(self), "skipped": skipped, "damaged_files": len(self.damaged), "damaged": damaged}


def count_sources(num_sources: int, parts: Sequence[tuple[Range | Block, RangeResult]]) -> list[SourceTally]:
    """Count every source, except for the splits; `parts` are of all tasks, in corpus order, with what they held."""
    tallies = [SourceTally() for _ in range(num_sources)]
    for file, of_file in groupby(parts, lambda part: part[0].file):
        held = [result for _, result in of_file]
        tally = tallies[file.source]
        lost, unverified = sum(part.lost_bytes for part in held), sum(part.unverified_bytes for part in held)
        tally.documents_in += sum(part.lines for part in held)
        tally.skipped += sum((part.skipped for part in held), Counter[str]())
        tally.bytes_in += file.bytes
        tally.bytes_lost += lost
        tally.bytes_unverified += unverified
        if damage := next((part.damage for part in held if part.damage), ""):
            documents = sum(part.lost_documents for part in held)
            tally.damaged.append(DamagedFile(file.name, damage, documents, lost, file.bytes, unverified))
    return tallies


def total(tallies: Sequence[SourceTally]) -> SourceTally:
    """All sources together."""
    whole = SourceTally()
    for tally in tallies:
        for one in fields(tally):
            setattr(whole, one.name, getattr(whole, one.name) + getattr(tally, one.name))
    return whole


def write_quarantine(tasks: Sequence[ShardTask], results: Mapping[str, ShardResult], folder: Path, path: Path) -> None:
    """Join the ``.bad`` files of all shards, in corpus order; no bad line, no file."""
    if not any(results[task.name].files["bad"][0] for task in tasks):
        path.unlink(missing_ok=True)
        return
    with atomic_file(path) as file:
        lines_before, last_name = 0, None
        for task in tasks:
            starts = []
            for part, held in zip(task.parts, results[task.name].ranges, strict=True):
                # The lines of a compressed file are counted from its beginning.
                if part.file.name != last_name or part.file.is_compressed:
                    lines_before, last_name = 0, part.file.name
                starts.append(lines_before)
                lines_before += held.lines
            with open(shard_path(folder, task.name, "bad"), "rb") as bad_lines:
                for line in bad_lines:
                    values = orjson.loads(line)
                    number = values.pop("range")
                    values["line"] += starts[number]
                    placed = {"file": task.parts[number].file.name, **values}
                    file.write(orjson.dumps(placed, option=orjson.OPT_APPEND_NEWLINE))


def check_sources(config: DataSettings, tallies: Sequence[SourceTally], paths: TokenPaths) -> None:
    """Raise UserError if there is no document, or too many bad ones (`check_bad_fraction`)."""
    whole = total(tallies)
    check_bad_fraction(config, whole, paths)
    if not whole.documents:
        why = f": {whole.reasons}" if whole.skipped else ""
        why += f"; damaged: {whole.damages}" if whole.damaged else ""
        rule = f"the corpus holds no document with text{why}"
        raise UserError(config.fault("input_jsonl", rule, _see(paths, whole)))


def check_bad_fraction(config: DataSettings, tally: SourceTally, paths: TokenPaths) -> None:
    """Raise UserError if the share of bad documents (empty lines do not count) or of bad bytes is too large.

    It names both, the counts by reason, the damaged files and the quarantine file.
    """
    harmless = sum(tally.skipped[reason] for reason in HARMLESS)
    bad, among = tally.skipped.total() - harmless, tally.documents_in - harmless
    bad_bytes, among_bytes = tally.bytes_lost + tally.bytes_unverified, tally.bytes_in
    shares = [bad / max(1, among), bad_bytes / max(1, among_bytes)]
    if max(shares) <= config.max_bad_fraction:
        return
    rule = f"{bad:,} of {among:,} documents are bad ({shares[0]:.3g} of them): {tally.reasons}"
    if bad_bytes:
        rule += f"; {bad_bytes:,} of {among_bytes:,} bytes on the disk are lost or unverified ({shares[1]:.3g})"
    enough = math.ceil(max(shares) * 1000) / 1000
    remedy = f"{_see(paths, tally)}; repair the corpus, or set max_bad_fraction to {enough:g}"
    if tally.damaged:
        rule += f"; damaged: {tally.damages}"
    if tally.bytes_unverified:
        remedy = f"download the damaged files again (unverified bytes count as bad); {remedy}"
    raise UserError(config.fault("max_bad_fraction", rule, remedy))


def _see(paths: TokenPaths, tally: SourceTally) -> str:
    return f"each is listed in {paths.quarantine}" if tally.skipped else ""
