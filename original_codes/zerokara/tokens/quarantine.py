"""The quarantine: every line that makes no document, with its place and the reason, in ``<prefix>_quarantine.jsonl``.

`corpus.documents` decides what is a bad line. The worker that meets one puts its `record` into the ``.bad`` file of its
shard; `collect` joins these files in the order of the corpus. One JSON object a line: ``file``, ``line`` (from 1; a
row of a .parquet), ``offset`` (byte in the unpacked file; index of the row), ``reason``, ``excerpt``, ``bytes``; of a
damage also ``documents`` and ``bytes_lost``. `accounts.check_bad_fraction` decides whether there are too many.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from zerokara.corpus.documents import BadLine, Reason
from zerokara.corpus.read import Range
from zerokara.durable import atomic_file


def record(range_number: int, item: BadLine) -> bytes:
    """The line of a shard's ``.bad`` file: the range stands for the file, and `line` is counted within it."""
    values: dict[str, Any] = {
        "range": range_number,
        "line": item.line,
        "offset": item.offset,
        "reason": item.reason.value,
        "excerpt": item.excerpt,
        "bytes": item.bytes,
    }
    if item.reason is Reason.DAMAGED:
        values |= {"documents": item.documents, "bytes_lost": item.lost_bytes}
    return orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE)


def collect(shards: Sequence[tuple[Path, Sequence[Range], Sequence[int]]], path: Path) -> None:
    """Write the quarantine file of all shards: the ``.bad`` file of each, its ranges, and the number of their lines.

    No bad line, no file.
    """
    if not any(bad_path.stat().st_size for bad_path, _, _ in shards):
        path.unlink(missing_ok=True)
        return
    with atomic_file(path) as file:
        lines_before, last_name = 0, None
        for bad_path, ranges, num_lines in shards:
            starts = []
            for range_, number in zip(ranges, num_lines, strict=True):
                if range_.file.name != last_name:
                    lines_before, last_name = 0, range_.file.name
                starts.append(lines_before)
                lines_before += number
            with open(bad_path, "rb") as bad_lines:
                for line in bad_lines:
                    values = orjson.loads(line)
                    number = values.pop("range")
                    values["line"] += starts[number]
                    placed = {"file": ranges[number].file.name, **values}
                    file.write(orjson.dumps(placed, option=orjson.OPT_APPEND_NEWLINE))
