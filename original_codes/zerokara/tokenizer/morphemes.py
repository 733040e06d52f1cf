"""Morphological analysers, each behind a small adapter: a line of text → the ends of its morphemes.

An adapter gives offsets into the text it was given (in Python's characters, so an emoji is one), whatever the analyser
itself normalises, skips or counts in. `boundaries` turns them into the places where a tokenizer may split: never inside
a grapheme that is written as several characters (combining marks, half-width voicing marks, emoji sequences), and
before the first of a run of spaces, because a space belongs to the piece that follows it.
Sources: fugashi 1.5.2 (MeCab 0.996, UniDic 2.1.2 in short units), SudachiPy 0.7.0 (split mode A, short units),
kiwipiepy 0.24.1, python-mecab-ko 1.3.7 (mecab-ko-dic 2.1.1). They are optional: `pyproject.toml` has an extra for each.
"""

from __future__ import annotations

import importlib.util
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata

from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.errors import RunError, UserError

Analyse = Callable[[str], Iterable[tuple[int, int]]]
"""A line of text → start and end of each morpheme in it, by rising start; white space may be left out."""

SPACE = " "
_JOINING = frozenset("\u200d\uff9e\uff9f\u309b\u309c")
"""Characters that belong to the one before them without being marks by category: the zero-width joiner (which also
binds the one after it) and the voicing marks that follow half-width kana."""


@dataclass(frozen=True)
class Analyser:
    """One analyser: the packages it needs, and how to start it."""

    name: str
    requirements: tuple[str, ...]
    """Exact versions, as pip takes them; the same as in the extra of that name in pyproject.toml."""
    modules: tuple[str, ...]
    start: Callable[[], Analyse]
    language: str = ""
    """Of the texts it is for: `ja` or `ko`."""

    def missing_modules(self) -> list[str]:
        """The modules that are not installed (nothing is imported to find out)."""
        return [module for module in self.modules if importlib.util.find_spec(module) is None]

    def versions(self) -> dict[str, str]:
        """The installed packages with their versions, which decide where morphemes end."""
        names = [requirement.split("==")[0] for requirement in self.requirements]
        return {name: metadata.version(name) for name in names}

    def version_text(self) -> str:
        """The packages and their versions, to be read."""
        return " with ".join(f"{name} {version}" for name, version in self.versions().items())


def _start_mecab() -> Analyse:
    import fugashi
    import unidic_lite

    # No mecabrc of the machine is read: its settings would change the result.
    tagger = fugashi.GenericTagger(f'-r /dev/null -d "{unidic_lite.DICDIR}"')
    return lambda text: _spans_of(text, (node.surface for node in tagger.parseToNodeList(text)))


def _start_sudachi() -> Analyse:
    from sudachipy import Dictionary, SplitMode

    tokenizer = Dictionary(dict="small").tokenizer(mode=SplitMode.A)
    return lambda text: [(morpheme.begin(), morpheme.end()) for morpheme in tokenizer.tokenize(text)]


def _start_kiwi() -> Analyse:
    from kiwipiepy import Kiwi

    kiwi = Kiwi(num_workers=1)
    return lambda text: [(token.start, token.start + token.len) for token in kiwi.tokenize(text)]


def _start_mecab_ko() -> Analyse:
    from mecab import MeCab

    tagger = MeCab()
    # Its own spans are wrong after a leading space or a tab (1.3.7), so the surfaces are searched for.
    return lambda text: _spans_of(text, tagger.morphs(text))


def _spans_of(text: str, surfaces: Iterable[str]) -> Iterator[tuple[int, int]]:
    """The offsets of surfaces that follow one another in the text, separated by nothing but white space."""
    end = 0
    for surface in surfaces:
        start = text.find(surface, end)
        if start < 0 or text[end:start].strip():
            raise RunError(f"the morphological analyser returned {surface!r}, which is not in {text[end:]!r}")
        end = start + len(surface)
        yield start, end


ANALYSERS = {
    analyser.name: analyser
    for analyser in (
        Analyser("mecab", ("fugashi==1.5.2", "unidic-lite==1.0.8"), ("fugashi", "unidic_lite"), _start_mecab, "ja"),
        Analyser(
            "sudachi",
            ("SudachiPy==0.7.0", "sudachidict-small==20261015"),
            ("sudachipy", "sudachidict_small"),
            _start_sudachi,
            "ja",
        ),
        Analyser("kiwi", ("kiwipiepy==0.24.1",), ("kiwipiepy", "kiwipiepy_model"), _start_kiwi, "ko"),
        Analyser(
            "mecab_ko",
            ("python-mecab-ko==1.3.7", "python-mecab-ko-dic==2.1.1.post2"),
            ("mecab", "mecab_ko_dic"),
            _start_mecab_ko,
            "ko",
        ),
    )
}
"""By the value of `pre_segment`."""


def analyser_of(config: TokenizerConfig) -> Analyser | None:
    """The analyser that the configuration asks for, if any.

    Raises: UserError where its packages are not installed; names the command that installs them.
    """
    if config.pre_segment == "none":
        return None
    analyser = ANALYSERS[config.pre_segment]
    if missing := analyser.missing_modules():
        rule = f"needs packages that are not installed (no module {', '.join(missing)})"
        command = ".venv/bin/pip install " + " ".join(analyser.requirements)
        raise UserError(config.fault("pre_segment", rule, f"install them with: {command}"))
    return analyser


def boundaries(text: str, spans: Iterable[tuple[int, int]], spaces: Callable[[str], bool]) -> list[int]:
    """Offsets where the text may be split between morphemes, rising, neither 0 nor its end among them.

    `spaces` tells whether a character becomes a space in the tokenizer.
    """
    ends: set[int] = set()
    inside: set[int] = set()
    for start, end in spans:
        ends |= {start, end}
        inside.update(range(start + 1, end))  # Two morphemes may share characters; no split between them.
    ends -= inside
    cuts = {_before_spaces(text, end, spaces) for end in ends}
    return sorted(cut for cut in cuts if 0 < cut < len(text) and not _is_one_grapheme(text, cut))


def _before_spaces(text: str, offset: int, spaces: Callable[[str], bool]) -> int:
    while offset and spaces(text[offset - 1]):
        offset -= 1
    return offset


def _is_one_grapheme(text: str, cut: int) -> bool:
    """Whether the characters before and after the cut are seen as one (a grapheme)."""
    before, after = text[cut - 1], text[cut]
    if after in _JOINING or before == "\u200d" or unicodedata.category(after).startswith("M"):
        return True
    if "\U0001f3fb" <= after <= "\U0001f3ff":  # The skin tone of the emoji before it.
        return True
    if "\U0001f1e6" <= after <= "\U0001f1ff" and "\U0001f1e6" <= before <= "\U0001f1ff":  # Flags are two letters.
        return True
    # Hangul in conjoining letters: vowels and finals belong to the consonant before them.
    return "\u1160" <= after <= "\u11ff" and "\u1100" <= before <= "\u11ff"
