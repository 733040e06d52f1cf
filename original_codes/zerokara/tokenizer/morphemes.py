"""Morphological analysers, each behind one small adapter: a line of text → where its morphemes end.

An adapter gives offsets into the text as it was handed over (in characters of Python, so an emoji is one), whatever
the analyser itself normalises, skips or counts in. `boundaries` makes of these the places where a tokenizer may cut:
never inside a character that is written as several (combining marks, half-width voicing marks, emoji sequences), and
at a run of spaces before its first one, because a space belongs to the piece that follows it.
Sources: fugashi 1.5.2 (MeCab 0.996, UniDic 2.1.2 in short units), SudachiPy 0.7.0 (split mode A, short units),
kiwipiepy 0.24.1, python-mecab-ko 1.3.7 (mecab-ko-dic 2.1.1). They are optional: `pyproject.toml` has an extra for each.
"""

from __future__ import annotations

import importlib.util
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata

from zerokara.config import TokenizerConfig
from zerokara.errors import RunError, UserError

Analyse = Callable[[str], Iterable[tuple[int, int]]]
"""A line of text → start and end of each morpheme in it, by rising start; white space may be left out."""

SPACE = " "
_JOINING = frozenset("\u200d\uff9e\uff9f\u309b\u309c")
"""What belongs to the character before it without being a mark by its category: the zero-width joiner (which also
takes the one behind it) and the voicing marks that follow half-width kana."""


@dataclass(frozen=True)
class Analyser:
    """One analyser: what must be installed for it, and how it is started."""

    name: str
    requirements: tuple[str, ...]
    """Exact versions, as pip takes them; the same as in the extra of that name in pyproject.toml."""
    modules: tuple[str, ...]
    start: Callable[[], Analyse]
    language: str
    """Of the texts it is for: `ja` or `ko`."""

    def missing_modules(self) -> list[str]:
        """The modules that are not installed (nothing is imported to find out)."""
        return [module for module in self.modules if importlib.util.find_spec(module) is None]

    def versions(self) -> dict[str, str]:
        """The packages that are installed, with their versions: they decide where morphemes end."""
        names = [requirement.split("==")[0] for requirement in self.requirements]
        return {name: metadata.version(name) for name in names}


def _start_mecab() -> Analyse:
    import fugashi
    import unidic_lite

    # No mecabrc of the machine is read: its settings would change the result.
    tagger = fugashi.GenericTagger(f'-r /dev/null -d "{unidic_lite.DICDIR}"')
    return lambda text: _found(text, (node.surface for node in tagger.parseToNodeList(text)))


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
    # Its own spans are wrong behind a leading space or a tab (1.3.7), so that the surfaces are looked for.
    return lambda text: _found(text, tagger.morphs(text))


def _found(text: str, surfaces: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Where surfaces stand that follow one another in the text with nothing but white space between them."""
    end = 0
    for surface in surfaces:
        start = text.find(surface, end)
        if start < 0 or text[end:start].strip():
            raise RunError(f"the morphological analyser gave {surface!r}, which is not what stands in {text[end:]!r}")
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
    """Where the text may be cut between morphemes: rising offsets, neither 0 nor its end among them.

    `spaces` tells whether a character becomes a space in the tokenizer.
    """
    ends: set[int] = set()
    inside: set[int] = set()
    for start, end in spans:
        ends |= {start, end}
        inside.update(range(start + 1, end))  # Two morphemes may share characters; there is no place between them.
    ends -= inside
    cuts = {_before_spaces(text, end, spaces) for end in ends}
    return sorted(cut for cut in cuts if 0 < cut < len(text) and not _is_one_character(text, cut))


def _before_spaces(text: str, offset: int, spaces: Callable[[str], bool]) -> int:
    while offset and spaces(text[offset - 1]):
        offset -= 1
    return offset


def _is_one_character(text: str, cut: int) -> bool:
    """Whether what stands before and behind the cut is seen as one character."""
    behind, before = text[cut], text[cut - 1]
    if behind in _JOINING or before == "\u200d" or unicodedata.category(behind).startswith("M"):
        return True
    if "\U0001f3fb" <= behind <= "\U0001f3ff":  # The colour of the emoji before it.
        return True
    if "\U0001f1e6" <= behind <= "\U0001f1ff" and "\U0001f1e6" <= before <= "\U0001f1ff":  # Flags are two letters.
        return True
    # Hangul written in conjoining letters: vowels and finals belong to the consonant before them.
    return "\u1160" <= behind <= "\u11ff" and "\u1100" <= before <= "\u11ff"
