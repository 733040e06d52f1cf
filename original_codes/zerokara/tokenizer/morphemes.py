"""Training sentences → the same text with one morpheme per line, so that no piece is learnt across a boundary.

In: a file with one sentence per line, and an optional package (`pyproject.toml` has an extra for each). Out: a file
whose lines, joined, are the sentences, where a space belongs to the morpheme that it precedes. The resulting model
segments plain text, without any analyser.

Why lines, and not SentencePiece's own `pretokenization_delimiter`: its trainer (0.2.3, `MakeSeedSentencePieces`) finds
candidates as substrings that occur before different characters, or at the end of a line. A morpheme that is always
followed by the delimiter is neither; and the delimiters count as characters in `character_coverage`. Equal lines are
cheap: they are trained on once, with their number.
Sources: fugashi 1.5.2 (MeCab 0.996, UniDic 2.1.2 in short units), SudachiPy 0.7.0 (split mode A, short units),
kiwipiepy 0.24.1, python-mecab-ko 1.3.7 (mecab-ko-dic 2.1.1).
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import islice
from pathlib import Path

import regex

from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.errors import RunError, UserError
from zerokara.progress import Progress
from zerokara.resources import available_memory, end_with_parent

Analyse = Callable[[str], Iterable[tuple[int, int]]]
"""A line of text → start and end of each morpheme, in Python's characters, by rising start; some leave out spaces."""

BLOCK_BYTES = 128 * 1024
"""Text that a process gets at a time."""
ALONE_BYTES = 1_000_000
"""Less text than this is analysed in this process: others would take longer to start."""
PROCESS_BYTES = 600_000_000
"""Memory of a process, which has its own dictionary (measured: Kiwi 550 MB, the others 120 to 140 MB)."""
_GRAPHEME = regex.compile(r"\X[\u309b\u309c]*")
"""What is seen as one character, such as an emoji sequence; spacing voicing marks belong to the kana before them."""


@dataclass(frozen=True)
class Analyser:
    """One analyser: the packages it needs, and how to start it."""

    name: str
    language: str
    """Of the texts it is for: `ja` or `ko`."""
    requirements: str
    """Packages in exact versions, as pip takes them; the same as in the extra of that name in pyproject.toml."""
    start: Callable[[], Analyse]

    def versions(self) -> dict[str, str]:
        """Its packages with the installed versions, which decide where morphemes end; empty for a missing one."""
        names = [requirement.split("==")[0] for requirement in self.requirements.split()]
        return {name: next((one.version for one in metadata.distributions(name=name)), "") for name in names}

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
        Analyser("mecab", "ja", "fugashi==1.5.2 unidic-lite==1.0.8", _start_mecab),
        Analyser("sudachi", "ja", "SudachiPy==0.7.0 sudachidict-small==20261015", _start_sudachi),
        Analyser("kiwi", "ko", "kiwipiepy==0.24.1", _start_kiwi),
        Analyser("mecab_ko", "ko", "python-mecab-ko==1.3.7 python-mecab-ko-dic==2.1.1.post2", _start_mecab_ko),
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
    if missing := [name for name, version in analyser.versions().items() if not version]:
        rule = f"needs packages that are not installed ({', '.join(missing)})"
        remedy = f"install them with: .venv/bin/pip install {analyser.requirements}"
        raise UserError(config.fault("pre_segment", rule, remedy))
    return analyser


def boundaries(text: str, spans: Iterable[tuple[int, int]], spaces: Callable[[str], bool]) -> list[int]:
    """Offsets where the text may be split between morphemes, rising, neither 0 nor its end among them.

    Never inside a grapheme that is written as several characters, and before the first of a run of spaces, because a
    space belongs to the piece that follows it. `spaces` tells whether a character becomes a space in the tokenizer.
    """
    ends: set[int] = set()
    inside: set[int] = set()
    for start, end in spans:
        ends |= {start, end}
        inside.update(range(start + 1, end))  # Two morphemes may share characters; no split between them.
    cuts = set()
    for cut in ends - inside:
        while cut and spaces(text[cut - 1]):
            cut -= 1
        cuts.add(cut)
    return [cut for match in _GRAPHEME.finditer(text) if (cut := match.start()) in cuts and cut]


def morphemes(line: str, analyse: Analyse, config: TokenizerConfig) -> list[str]:
    """Split a line between its morphemes, but in no user symbol; the parts join to the line again."""
    normalizes = config.normalization_rule_name != "identity"  # and may make a space of other white space
    cuts = boundaries(line, analyse(line), lambda character: character == " " or (normalizes and character.isspace()))
    if config.user_defined_symbols:
        pattern = "|".join(map(re.escape, sorted(config.user_defined_symbols, key=len, reverse=True)))
        whole = {i for match in re.finditer(pattern, line) for i in range(match.start() + 1, match.end())}
        cuts = [cut for cut in cuts if cut not in whole]
    return [line[start:end] for start, end in zip([0, *cuts], [*cuts, len(line)], strict=True)]


def segment(config: TokenizerConfig, analyser: Analyser, sentences: Path, target: Path, num_processes: int) -> None:
    """Write the sentences with one morpheme per line, in their order; a few blocks per process are in memory.

    Raises:
        RunError: a process of the analysis died.
    """
    size = sentences.stat().st_size
    num_processes = 1 if size < ALONE_BYTES else max(1, min(num_processes, available_memory() // PROCESS_BYTES))
    progress = Progress(f"splitting into morphemes with {analyser.name}", total=size, unit="B")
    with open(sentences, "rb") as source, open(target, "wb") as file, progress:
        blocks = iter(lambda: b"".join(source.readlines(BLOCK_BYTES)), b"")
        if num_processes == 1:
            split = partial(_split, analyser.start(), config)
            for block in blocks:
                file.write(split(block))
                progress.advance(len(block))
            return
        context = multiprocessing.get_context("spawn")
        try:
            with ProcessPoolExecutor(num_processes, context, _start_worker, (analyser, config, os.getpid())) as pool:
                waiting = deque(pool.submit(_split_in_worker, block) for block in islice(blocks, 4 * num_processes))
                while waiting:
                    while not wait([waiting[0]], timeout=1.0).done:
                        progress.advance(0)
                    num_bytes, lines = waiting.popleft().result()
                    file.write(lines)
                    progress.advance(num_bytes)
                    waiting.extend(pool.submit(_split_in_worker, block) for block in islice(blocks, 1))
        except BrokenProcessPool as error:
            raise RunError(
                f"a process of the morphological analysis ({analyser.name}) was killed, most often because "
                f"memory ran out; set num_threads to less than {num_processes} and run again"
            ) from error


_SPLIT: Callable[[bytes], bytes]


def _start_worker(analyser: Analyser, config: TokenizerConfig, parent_pid: int) -> None:
    """Initialise a worker process: the analyser is started once in each."""
    global _SPLIT
    end_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the workers.
    _SPLIT = partial(_split, analyser.start(), config)


def _split_in_worker(block: bytes) -> tuple[int, bytes]:
    return len(block), _SPLIT(block)


def _split(analyse: Analyse, config: TokenizerConfig, block: bytes) -> bytes:
    prefix = " " if config.add_dummy_prefix else ""
    lines = (prefix + "\n".join(morphemes(line, analyse, config)) for line in block.decode().split("\n")[:-1])
    return "".join(line + "\n" for line in lines).encode()
