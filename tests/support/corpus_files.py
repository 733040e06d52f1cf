"""Corpus files for tests, compressed as their names say, found and read as the steps do."""

import gzip
import io
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from zerokara.corpus.compressed import zstd_module
from zerokara.corpus.documents import BadLine, Document, TxtDocument
from zerokara.corpus.find import InputFile, find_files
from zerokara.corpus.read import read_files

COMPRESS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstd_module().compress}


def json_lines(texts: Iterable[str]) -> bytes:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


def write_jsonl(path: Path, records: Iterable[object]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def write_texts(path: Path, texts: Iterable[str]) -> str:
    return write_jsonl(path, ({"text": text} for text in texts))


def parquet(row_group_size: int, **columns: Sequence[Any]) -> bytes:
    """The bytes of a .parquet with these columns."""
    stream = io.BytesIO()
    pq.write_table(pa.table(columns), stream, row_group_size=row_group_size)
    return stream.getvalue()


def compressed(path: Path, content: bytes) -> Path:
    """Write the content as the ending of the name says; return the path."""
    path.write_bytes(COMPRESS.get(path.suffix, bytes)(content))
    return path


def found(path: Path, content: bytes | None = None) -> InputFile:
    """Find a file, written with a content if one is given, by an entry that names it."""
    if content is not None:
        path.write_bytes(content)
    (file,) = find_files([str(path)], "")
    return file


def items_of(path: Path, size: int = 1 << 30, txt_document: TxtDocument = "line") -> list[Document | BadLine]:
    """Documents and bad lines of a file, cut into parts of a size."""
    return list(read_files([found(path)], "reading", "text", txt_document, size))
