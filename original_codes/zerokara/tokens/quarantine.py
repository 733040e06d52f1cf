"""Bad lines: their quarantine, the check of `max_bad_fraction`, and the counts of every document, source by source.

Each worker counts a bad line where it meets it (`shards`), by its reason; here the counts are added up and checked.
Documents: what came in = train + valid + skipped, where every row of a damaged row group is one that was skipped.

Bytes are those of the files on disk (compressed, if they are), and matter only where something cannot be counted in
documents. *Lost* bytes could not be read, or nothing confirms them: of a damaged compressed file all but its
`verified_bytes` (`corpus.compressed`); of a damaged row group, the share of its missing rows; a line that is too long.
Documents that could be read are used all the same.

The quarantine lists every line that makes no document, one JSON object a line: ``file``, ``line`` (from 1; a row of a
.parquet), ``offset`` (byte in the unpacked file; index of the row), ``reason``, ``excerpt``, ``bytes``; of a damage
``documents`` and ``bytes_lost``, too.
"""

import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import orjson

from zerokara.base.durable import atomic_file
from zerokara.base.errors import Fault, refuse
from zerokara.base.progress import bytes_text, first_of
from zerokara.config.data import DataSettings
from zerokara.corpus.documents import HARMLESS
from zerokara.corpus.read import Block, Range
from zerokara.tokens.indexed import TokenPaths
from zerokara.tokens.shards import RangeResult, ShardResult, ShardTask, check_shard, shard_path

NAMED_FILES = 5
"""Damaged files named in the summary and in an error; the manifest names all."""


@dataclass
class _Tally:
    """Counts that are added field by field."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass
class SplitTally(_Tally):
    documents: int = 0
    tokens: int = 0
    """Including the end-of-document ids."""
    text_bytes: int = 0
    """UTF-8 bytes of the documents' text."""


@dataclass
class SourceTally(_Tally):
    """Documents of one source, or of all, and bytes of its files; the top of this file says what adds up to what."""

    documents_in: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Number of documents by reason."""
    bytes_in: int = 0
    bytes_lost: int = 0
    damaged: list[str] = field(default_factory=list)
    """Files of which the end or some row groups could not be read, each with the first damage and the bytes lost."""
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
        return first_of(self.damaged, NAMED_FILES)

    def facts(self) -> dict[str, Any]:
        """All counts, for the manifest."""
        return {**vars(self), "skipped": dict(self.skipped.most_common()), "damaged_files": len(self.damaged)}


def count_sources(num_sources: int, ranges: Sequence[tuple[Range | Block, RangeResult]]) -> list[SourceTally]:
    """Count every source, except for the splits; `ranges` are of all tasks, in corpus order, with what they held."""
    tallies = [SourceTally() for _ in range(num_sources)]
    for file, pairs in groupby(ranges, lambda pair: pair[0].file):
        held = [result for _, result in pairs]
        tally = tallies[file.source]
        lost = sum(each.lost_bytes for each in held)
        tally.documents_in += sum(each.lines for each in held)
        tally.skipped += sum((each.skipped for each in held), Counter[str]())
        tally.bytes_in += file.bytes
        tally.bytes_lost += lost
        if damage := next((each.damage for each in held if each.damage), ""):
            loss = f"{bytes_text(lost)} of {bytes_text(file.bytes)} lost"
            tally.damaged.append(f"{file.name} ({damage}: {loss})")
    return tallies


def write_quarantine(tasks: Sequence[ShardTask], results: Mapping[str, ShardResult], folder: Path, path: Path) -> None:
    """Join the ``.bad`` files of all shards, in corpus order; no bad line, no file."""
    if not any(results[task.name].files["bad"][0] for task in tasks):
        path.unlink(missing_ok=True)
        return
    with atomic_file(path) as file:
        lines_before, last_name = 0, None
        for task in tasks:
            starts = []
            for range_, held in zip(task.ranges, results[task.name].ranges, strict=True):
                # The lines of a compressed file are counted from its beginning.
                if range_.file.name != last_name or range_.file.is_compressed:
                    lines_before, last_name = 0, range_.file.name
                starts.append(lines_before)
                lines_before += held.lines
            content = shard_path(folder, task.name, "bad").read_bytes()
            check_shard(folder, results[task.name], "bad", len(content), zlib.crc32(content))
            for line in content.splitlines():
                values = orjson.loads(line)
                number = values.pop("range")
                values["line"] += starts[number]
                placed = {"file": task.ranges[number].file.name, **values}
                file.write(orjson.dumps(placed, option=orjson.OPT_APPEND_NEWLINE))


def check_bad_fraction(config: DataSettings, tally: SourceTally, paths: TokenPaths) -> None:
    """Raise UserError if the share of bad documents (empty lines do not count), or that of lost bytes, is too large, or
    no document is left."""
    harmless, faults = sum(tally.skipped[reason] for reason in HARMLESS), list[Fault]()
    bad, among = tally.skipped.total() - harmless, tally.documents_in - harmless
    if bad / max(1, among) > config.max_bad_fraction:
        rule = f"{bad:,} of {among:,} documents are bad ({100 * bad / among:.3g} %): {tally.reasons}"
        remedy = f"each is listed in {paths.quarantine}; repair the corpus"
        remedy += f", or set it to {_enough(bad / among):g}" if bad < among else ""
        faults.append(config.fault("max_bad_fraction", rule, remedy))
    lost, size = tally.bytes_lost, tally.bytes_in
    if lost / max(1, size) > config.max_bad_fraction:
        files = f", of {tally.damages}" if tally.damaged else ", in lines that are too long"
        rule = f"{lost:,} of {size:,} bytes on the disk are lost ({100 * lost / size:.3g} %){files}"
        remedy = f"download or make these files again, or set it to {_enough(lost / size):g}"
        faults.append(config.fault("max_bad_fraction", rule, remedy))
    if not tally.documents and not faults:
        rule = f"the corpus holds no document with text: {tally.reasons or 'nothing at all'}"
        is_listed = paths.quarantine.exists()
        faults.append(config.fault("input_jsonl", rule, f"each is listed in {paths.quarantine}" if is_listed else ""))
    refuse(faults)


def _enough(share: float) -> float:
    return math.ceil(share * 1000) / 1000
