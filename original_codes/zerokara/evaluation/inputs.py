"""What step 8 is given: folders of Hugging Face models, as far as names tell, and text to measure bits per byte on.

In: `models` and `texts` of the configuration. Out: faults of folders, and `MeasuredText` for each entry of `texts`, its
documents drawn at random where the entry is larger than what may be measured. No torch here: a wrong name is refused at
once.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import groupby
from pathlib import Path

from zerokara.config.evaluate_config import TextSettings
from zerokara.corpus.documents import HARMLESS, Document, TxtDocument
from zerokara.corpus.find import InputFile, find_files
from zerokara.corpus.read import ranges, read
from zerokara.errors import Fault, UserError
from zerokara.progress import log

_CONTENT = (".safetensors", ".json", ".model", ".txt", ".jinja")
"""Files that make a model what it is: weights, configuration, tokenizer (vocab.txt, merges.txt)."""
_RECORDS = ("manifest.json", "upload.manifest.json", "trainer_state.json")


def check_folder(folder: Path) -> Fault | None:
    """What keeps a folder from being a model, as far as names tell; needs no torch."""
    if not folder.is_dir():
        return Fault(str(folder), "there is no such folder", remedy="name a Hugging Face folder on this machine")
    if not (folder / "config.json").is_file():
        return Fault(str(folder), "holds no config.json: it is not a Hugging Face model", remedy="name its folder")
    if not list(folder.glob("*.safetensors")):
        rule = "holds no .safetensors (weights in pickled files are not opened: they can run code)"
        return Fault(str(folder), rule, remedy="save it again with model.save_pretrained(folder)")
    return None


def model_files(folder: Path) -> list[Path]:
    """The files of a folder that make the model what it is, by name."""
    files = [path for path in folder.iterdir() if path.is_file() and path.suffix in _CONTENT]
    return sorted(path for path in files if path.name not in _RECORDS)


def short_names(paths: Sequence[Path]) -> list[str]:
    """Each path's last parts, as many as tell them all apart."""
    parts = [path.absolute().parts for path in paths]
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return list(map(str, paths))


@dataclass(frozen=True)
class MeasuredText:
    """The documents of one entry, in their order."""

    name: str
    """The entry's file or folder name, with as much of its path as tells it from the others."""
    documents: tuple[str, ...]
    num_found: int
    """Documents of the entry, of which these were drawn."""
    bad_lines: dict[str, int] = field(default_factory=dict)
    """Reasons why lines were not documents, and how many."""

    @cached_property
    def bytes(self) -> list[int]:
        """UTF-8 bytes of each document's text, without any end."""
        return [len(document.encode()) for document in self.documents]

    @cached_property
    def content(self) -> str:
        """SHA-256 over the documents."""
        digest = sha256()
        for document in self.documents:
            encoded = document.encode()
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return digest.hexdigest()


def find_texts(config: TextSettings) -> list[InputFile]:
    """The files of `texts`.

    Raises:
        UserError: an entry names nothing, or what cannot be read.
    """
    return find_files(config.texts, config.where("texts")) if config.texts else []


def read_texts(config: TextSettings, files: Sequence[InputFile], seed: int) -> Iterator[MeasuredText]:
    """Read the entries, one after the other.

    Raises:
        UserError: an entry holds no document.
    """
    names = short_names([Path(entry) for entry in config.texts])
    for source, members in groupby(files, key=lambda file: file.source):
        text = draw(names[source], list(members), config.text_field, config.txt_document, config.max_text_bytes, seed)
        if not text.documents:
            reasons = ", ".join(f"{reason} ({count:,})" for reason, count in text.bad_lines.items()) or "it is empty"
            raise UserError(config.fault(f"texts[{source}]", f"holds no document: {reasons}", "check text_field"))
        if (size := sum(text.bytes)) > config.max_text_bytes:
            log(f"warning: {text.name}: one document of {size:,} bytes is measured, more than max_text_bytes")
        yield text


def draw(
    name: str, files: Sequence[InputFile], text_field: str, txt_document: TxtDocument, max_bytes: int, seed: int
) -> MeasuredText:
    """Read all documents of `files` and keep at most `max_bytes` of them (at least one document), drawn at random.

    Each document gets a random number as it is read, and those with the smallest stay: the same as the beginning of a
    shuffled list, in one pass and without its memory.
    """
    numbers = random.Random(seed)
    kept: list[tuple[float, int, str]] = []  # a heap, the largest random number (negated) first
    num_found, total, limit = 0, 0, 1.0
    bad: Counter[str] = Counter()
    for part in ranges(files, 1 << 26, txt_document):
        for item in read(part, text_field, txt_document):
            if not isinstance(item, Document):
                if item.reason not in HARMLESS:
                    bad[str(item.reason)] += item.documents
                continue
            number, num_found = numbers.random(), num_found + 1
            if number > limit:
                continue
            heapq.heappush(kept, (-number, num_found, item.text))
            total += len(item.text.encode())
            while total > max_bytes and len(kept) > 1:
                negated, _, text = heapq.heappop(kept)
                total, limit = total - len(text.encode()), -negated  # a later one beyond it does not fill the room
    documents = tuple(text for _, _, text in sorted(kept, key=lambda each: each[1]))
    return MeasuredText(name, documents, num_found, dict(bad))
