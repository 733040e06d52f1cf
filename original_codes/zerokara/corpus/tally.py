"""How much of a corpus could be read, counted alike by steps 0, 1 and 2, and the check of `max_bad_fraction`.

Documents: every row of a damaged row group is one that was skipped. Bytes are those of the files on disk (compressed,
if they are), and matter only where something cannot be counted in documents. *Lost* bytes could not be read, or nothing
confirms them: of a damaged compressed file all but its `verified_bytes` (`corpus.compressed`); of a damaged row group,
the share of its missing rows; a line that is too long; a file that is one document, and bad. Documents that could be
read are used all the same.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Self

from zerokara.base.errors import Fault
from zerokara.base.progress import bytes_text, first_of
from zerokara.config.clean_config import CleanConfig
from zerokara.config.data import DataSettings
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.corpus.documents import HARMLESS
from zerokara.corpus.find import InputFile

NAMED_FILES = 5
"""Damaged files named in the summary and in an error; the manifest names all."""


@dataclass
class Counts:
    """Counts that are added field by field."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass
class ReadTally(Counts):
    """Documents of files, and their bytes; the top of this module says what counts as what."""

    documents_in: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Number of documents by reason."""
    bytes_in: int = 0
    bytes_lost: int = 0
    damaged: list[str] = field(default_factory=list)
    """Files that have lost bytes, each with the first reason and their number."""

    def add(self, file: InputFile, documents_in: int, skipped: Mapping[str, int], lost: int, damage: str) -> None:
        """Count a whole file; `damage` is empty if there is none."""
        self.documents_in += documents_in
        self.skipped.update(skipped)
        self.bytes_in += file.bytes
        self.bytes_lost += lost
        if damage:
            self.damaged.append(f"{file.name} ({damage}: {bytes_text(lost)} of {bytes_text(file.bytes)} lost)")

    @property
    def documents(self) -> int:
        """Number of documents with text."""
        return self.documents_in - self.skipped.total()

    @property
    def reasons(self) -> str:
        """``broken JSON 12, empty text 3``."""
        return ", ".join(f"{reason} {count:,}" for reason, count in self.skipped.most_common())

    @property
    def damages(self) -> str:
        """The first few damaged files with the loss of each, and the number of others."""
        return first_of(self.damaged, NAMED_FILES)

    @property
    def losses(self) -> str:
        """The share of the bytes on the disk that is lost, and where."""
        lost, size = self.bytes_lost, self.bytes_in
        where = f", of {self.damages}" if self.damaged else ""
        return f"{lost:,} of {size:,} bytes on the disk are lost ({100 * lost / max(1, size):.3g} %){where}"


def faults_of(
    config: CleanConfig | TokenizerConfig | DataSettings, key: str, tally: ReadTally, listed: str
) -> list[Fault]:
    """Faults if the share of bad documents (empty lines do not count), or that of lost bytes, is too large, or no
    document is left; `listed` tells where the bad ones are, `key` is the setting with the names of the files."""
    found, faults = replace(tally, skipped=Counter(tally.skipped)), list[Fault]()
    harmless = sum(found.skipped.pop(reason, 0) for reason in HARMLESS)
    bad, among = found.skipped.total(), tally.documents_in - harmless
    shares = bad / max(1, among), tally.bytes_lost / max(1, tally.bytes_in)
    enough = f"or set it to {math.ceil(max(shares) * 1000) / 1000:g}"
    if shares[0] > config.max_bad_fraction:
        rule = f"{bad:,} of {among:,} documents are bad ({100 * shares[0]:.3g} %): {found.reasons}"
        remedy = f"{listed}; repair the corpus" + (f", {enough}" if bad < among else "")
        faults.append(config.fault("max_bad_fraction", rule, remedy))
    if shares[1] > config.max_bad_fraction:
        remedy = "download a damaged file again, convert others to UTF-8, split what is too long (txt_document: line), "
        remedy += f"and the step starts over; {enough}"
        faults.append(config.fault("max_bad_fraction", tally.losses, remedy))
    if not tally.documents and not faults:
        rule = f"the corpus holds no document with text: {tally.reasons or 'nothing at all'}"
        faults.append(config.fault(key, rule, listed if tally.skipped else ""))
    return faults
