"""How many tokens a corpus will have, from a small sample, so that a full disk is foreseen before the work begins."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zerokara.config.pretrain_config import DataSettings
from zerokara.corpus.inputs import InputFile
from zerokara.corpus.reading import ByteRange, Document, read
from zerokara.errors import UserError
from zerokara.progress import bytes_text
from zerokara.tokens.indexed import dtype_for
from zerokara.tokens.shards import TextEncoder

SAMPLE_FILES = 8
SAMPLE_CHARACTERS = 32 * 1024
_GZIP_HEAD = 256 * 1024


@dataclass(frozen=True)
class Estimate:
    """What is expected of a corpus; good to some ten percent where its files resemble each other."""

    tokens: int
    output_bytes: int
    """Of the .bin files."""


def estimate(config: DataSettings, files: Sequence[InputFile], encoder: TextEncoder) -> Estimate:
    """Encode the beginnings of a few files; takes some milliseconds for each."""
    sampled_bytes = sampled_tokens = 0
    sampled = [file for file in files if file.bytes][:: max(1, len(files) // SAMPLE_FILES)]
    for file in sampled:
        texts, characters, end = [], 0, 0
        for item in read(ByteRange(file), config.text_field, "line"):
            if characters >= SAMPLE_CHARACTERS:
                end = item.offset
                break
            if isinstance(item, Document):
                texts.append(item.text)
                characters += len(item.text)
        sampled_bytes += end or plain_bytes(file)
        sampled_tokens += sum(len(ids) + 1 for ids in encoder.encode_many(texts)) if texts else 0
    total = sum(plain_bytes(file) for file in files)
    tokens = round(sampled_tokens * total / sampled_bytes) if sampled_bytes else 0
    return Estimate(tokens, tokens * dtype_for(encoder.vocab_size).itemsize)


def plain_bytes(file: InputFile) -> int:
    """Size of a file uncompressed; guessed from its beginning if it is gzipped."""
    if not file.gzipped:
        return file.bytes
    with open(file.path, "rb") as raw:
        head = raw.read(_GZIP_HEAD)
    try:
        unpacked = len(zlib.decompressobj(wbits=31).decompress(head))
    except zlib.error:
        return file.bytes
    return round(file.bytes * unpacked / max(1, len(head)))


def check_disk_space(config: DataSettings, expected: Estimate) -> None:
    """Check that the token files will fit (they and their shards never lie there twice).

    Raises:
        UserError: they will not.
    """
    folder = Path(config.output_prefix).absolute().parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < expected.output_bytes:
        rule = f"needs about {bytes_text(expected.output_bytes)}, and {bytes_text(free)} are free at {folder}"
        raise UserError(config.fault("output_prefix", rule, "make room, or name a larger disk"))
