"""Bad lines: their quarantine, and the counts of every document, source by source (`corpus.tally`).

Each worker counts a bad line where it meets it (`shards`), by its reason; here the counts are added up.
Documents: what came in = train + valid + skipped.

The quarantine lists every line that makes no document, one JSON object a line: ``file``, ``line`` (from 1; a row of a
.parquet), ``offset`` (byte in the unpacked file; index of the row), ``reason``, ``excerpt``, ``bytes``; of a damage
``documents`` and ``bytes_lost``, too.
"""

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson

from zerokara.base.durable import atomic_file
from zerokara.base.errors import refuse
from zerokara.config.data import DataSettings
from zerokara.corpus.read import Block, Range
from zerokara.corpus.tally import Counts, ReadTally, faults_of
from zerokara.tokens.indexed import TokenPaths
from zerokara.tokens.shards import RangeResult, ShardResult, ShardTask, check_shard, shard_path


@dataclass
class SplitTally(Counts):
    documents: int = 0
    tokens: int = 0
    """Including the end-of-document ids."""
    text_bytes: int = 0
    """UTF-8 bytes of the documents' text."""


@dataclass
class SourceTally(ReadTally):
    """Documents of one source, or of all, and bytes of its files; the top of this file says what adds up to what."""

    train: SplitTally = field(default_factory=SplitTally)
    valid: SplitTally = field(default_factory=SplitTally)

    def facts(self) -> dict[str, Any]:
        """All counts, for the manifest."""
        return {**vars(self), "skipped": dict(self.skipped.most_common()), "damaged_files": len(self.damaged)}


def count_sources(num_sources: int, ranges: Sequence[tuple[Range | Block, RangeResult]]) -> list[SourceTally]:
    """Count every source, except for the splits; `ranges` are of all tasks, in corpus order, with what they held."""
    tallies = [SourceTally() for _ in range(num_sources)]
    for file, pairs in groupby(ranges, lambda pair: pair[0].file):
        held = [result for _, result in pairs]
        skipped = sum((each.skipped for each in held), Counter[str]())
        damage = next((each.damage for each in held if each.damage), "")
        lines, lost = sum(each.lines for each in held), sum(each.lost_bytes for each in held)
        tallies[file.source].add(file, lines, skipped, lost, damage)
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
    """Raise UserError if too much is bad, or no document is left."""
    refuse(faults_of(config, "input_jsonl", tally, f"each is listed in {paths.quarantine}"))
