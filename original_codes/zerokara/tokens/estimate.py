"""A small sample of the corpus, and how many tokens the whole will have, so that a full disk is foreseen."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerokara.config.data_settings import DataSettings
from zerokara.corpus.inputs import InputFile
from zerokara.corpus.reading import Document, Range, read
from zerokara.corpus.sizes import bytes_before, plain_bytes
from zerokara.errors import UserError
from zerokara.progress import bytes_text

if TYPE_CHECKING:  # the sample is taken before numpy is there
    from zerokara.config.pretrain_config import DataSettings
    from zerokara.tokens.shards import TextEncoder

SAMPLE_PLACES = 8
"""Beginnings of so many files; of fewer files, other places in them too."""
PLACE_CHARACTERS = 128 * 1024
ESTIMATE_CHARACTERS = 32 * 1024
"""Of each place, what is encoded for the estimate."""


@dataclass(frozen=True)
class Place:
    """The documents at one place of the corpus."""

    texts: list[str]
    sampled_bytes: int
    """Unpacked bytes of the file that they took."""


@dataclass(frozen=True)
class Estimate:
    """What is expected of a corpus; good to some ten percent where its files resemble each other."""

    tokens: int
    output_bytes: int
    """Of the .bin files."""


def sample(config: DataSettings, files: Sequence[InputFile]) -> list[Place]:
    """Some documents from up to `SAMPLE_PLACES` places; takes some milliseconds for each."""
    return [place for start in _places(files) if (place := _read_place(config, start)).texts]


def estimate(corpus_bytes: int, places: Sequence[Place], encoder: TextEncoder) -> Estimate:
    """Encode a little of the sample; `corpus_bytes` are those of all files, unpacked."""
    from zerokara.tokens.indexed import dtype_for

    sampled_bytes = sampled_tokens = 0
    for place in places:
        part, characters = [], 0
        for text in place.texts:
            if characters >= ESTIMATE_CHARACTERS:
                break
            part.append(text)
            characters += len(text)
        share = characters / max(1, sum(map(len, place.texts)))
        sampled_bytes += round(place.sampled_bytes * share)
        sampled_tokens += len(encoder.encode_joined(part)[0])
    tokens = round(sampled_tokens * corpus_bytes / sampled_bytes) if sampled_bytes else 0
    return Estimate(tokens, tokens * dtype_for(encoder.vocab_size).itemsize)


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


def _places(files: Sequence[InputFile]) -> Iterator[Range]:
    chosen = [file for file in files if file.bytes]
    chosen = chosen[:: max(1, len(chosen) // SAMPLE_PLACES)]
    parts = max(1, SAMPLE_PLACES // max(1, len(chosen)))
    for file in chosen:
        # To come to the middle of a packed file all before it would have to be unpacked.
        can_seek = file.packing == "none" and file.kind != "parquet"
        for part in range(parts if can_seek and file.bytes > parts * PLACE_CHARACTERS else 1):
            yield Range(file, part * file.bytes // parts)


def _read_place(config: DataSettings, start: Range) -> Place:
    texts: list[str] = []
    characters, first, last = 0, None, None
    items = iter(read(start, config.text_field, "line"))
    for item in items:
        first = bytes_before(item) if first is None else first
        if characters >= PLACE_CHARACTERS:
            last = bytes_before(item)
            break
        if isinstance(item, Document):
            texts.append(item.text)
            characters += len(item.text)
    end = plain_bytes(start.file) if last is None else last
    return Place(texts, max(0, end - (first or 0)))
