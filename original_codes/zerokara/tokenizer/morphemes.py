"""Training sentences → the same text with one morpheme per line, so that no piece is learnt across a boundary.

In: a file with one sentence per line, and an optional package (`pyproject.toml` has an extra for each). Out: a file
whose lines, joined, are the sentences. The resulting model segments plain text, without any analyser.

Lines, and not SentencePiece's own `pretokenization_delimiter`, because its trainer (0.2.3, `MakeSeedSentencePieces`)
finds candidates as substrings that occur before different characters, or at the end of a line; a morpheme that is
always followed by the delimiter is neither. Equal lines are cheap: they are trained on once, with their number.
Sources: fugashi 1.5.2 (MeCab 0.996, UniDic 2.1.2 in short units), SudachiPy 0.7.0 (split mode A, short units),
kiwipiepy 0.24.1, python-mecab-ko 1.3.7 (mecab-ko-dic 2.1.1).
"""

import math
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from itertools import islice
from pathlib import Path

import numpy as np
import regex
import sentencepiece

from zerokara.base.errors import RunError, UserError
from zerokara.base.progress import Progress
from zerokara.base.resources import available_memory, end_with_parent, ended
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.tokenizer.model_file import ModelFile, PieceType

Analyse = Callable[[str], Iterable[tuple[int, int]]]
"""A line of text → start and end of each morpheme, in characters, by rising start; spaces may be left out."""

BLOCK_BYTES, BLOCKS_PER_PROCESS = 128 * 1024, 16
"""Text handed to a process at a time, and how many such blocks are read ahead of each."""
ALONE_BYTES = 1_000_000
"""Less text than this is analysed in this process: others would take longer to start."""
PROCESS_BYTES = 600_000_000
"""Memory of a process, which holds a dictionary (measured: Kiwi 550 MB, the others 120 to 140 MB)."""
ROUNDS, STRENGTH = 3, 2.0
"""Rounds of `rescore`, and its factor of the logarithm; 1 would take more rounds."""
MAX_RESCORED_BYTES = 5_000_000
"""Text of each round."""
_BLOCK_LINES = 32
_GRAPHEME = regex.compile(r"\X[\u309b\u309c]*")
"""Grapheme, such as an emoji sequence; spacing voicing marks belong to the kana before them."""


@dataclass(frozen=True)
class Analyser:
    """A morphological analyser: the packages it needs, and the function that starts it."""

    name: str
    requirements: str
    """Packages in exact versions, as pip takes them; the same as in the extra of that name in pyproject.toml."""
    start: Callable[[], Analyse]

    def versions(self) -> dict[str, str]:
        """Return the installed versions of its packages, which decide where morphemes end; empty for a missing one."""
        names = [requirement.split("==")[0] for requirement in self.requirements.split()]
        return {name: next((one.version for one in metadata.distributions(name=name)), "") for name in names}


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
    """Yield the offsets of surfaces that follow one another in the text, separated only by white space."""
    end = 0
    for surface in surfaces:
        start = text.find(surface, end)
        if start < 0 or text[end:start].strip():
            raise RunError(f"the morphological analyser returned {surface!r}, which is not in {text[end:]!r}")
        end = start + len(surface)
        yield start, end


ANALYSERS = {
    "mecab": Analyser("mecab", "fugashi==1.5.2 unidic-lite==1.0.8", _start_mecab),
    "sudachi": Analyser("sudachi", "SudachiPy==0.7.0 sudachidict-small==20261015", _start_sudachi),
    "kiwi": Analyser("kiwi", "kiwipiepy==0.24.1", _start_kiwi),
    "mecab_ko": Analyser("mecab_ko", "python-mecab-ko==1.3.7 python-mecab-ko-dic==2.1.1.post2", _start_mecab_ko),
}
"""By the value of `pre_segment`."""


def analyser_of(config: TokenizerConfig) -> Analyser | None:
    """Return the analyser of `pre_segment`, if any.

    Raises:
        UserError: its packages are not installed; names the command that installs them.
    """
    if config.pre_segment == "none":
        return None
    analyser = ANALYSERS[config.pre_segment]
    if missing := [name for name, version in analyser.versions().items() if not version]:
        rule = f"needs packages that are not installed ({', '.join(missing)})"
        remedy = f"install them with: .venv/bin/pip install {analyser.requirements}"
        raise UserError(config.fault("pre_segment", rule, remedy))
    return analyser


def morphemes(line: str, analyse: Analyse, config: TokenizerConfig) -> list[str]:
    """Split a line between its morphemes, never inside a grapheme or a user symbol; the parts join to the line again.

    A space belongs to the piece that follows it, so the split is before the first of a run of spaces.
    """
    ends: set[int] = set()
    inside: set[int] = set()
    for start, end in analyse(line):
        ends |= {start, end}
        inside.update(range(start + 1, end))  # Two morphemes may share characters; no split between them.
    spaces = " " if config.normalization_rule_name == "identity" else None  # other rules may make one of white space
    cuts = {len(line[:cut].rstrip(spaces)) for cut in ends - inside}
    if config.user_defined_symbols:
        pattern = "|".join(map(re.escape, sorted(config.user_defined_symbols, key=len, reverse=True)))
        cuts -= {i for match in re.finditer(pattern, line) for i in range(match.start() + 1, match.end())}
    starts = [start for match in _GRAPHEME.finditer(line) if (start := match.start()) in cuts and start]
    return [line[start:end] for start, end in zip([0, *starts], [*starts, len(line)], strict=True)]


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
        context = multiprocessing.get_context("spawn")
        try:
            pool = ProcessPoolExecutor(num_processes, context, _start_worker, (os.getpid(),))
            with ended(pool):
                in_order = pool.map if num_processes > 1 else map  # the pool starts no process before it is asked
                while some := list(islice(blocks, BLOCKS_PER_PROCESS * num_processes)):
                    for block, lines in zip(some, in_order(partial(_split, analyser, config), some), strict=True):
                        file.write(lines)
                        progress.advance(len(block))
        except BrokenProcessPool as error:
            raise RunError(
                f"a process of the morphological analysis ({analyser.name}) was killed, most often because "
                f"memory ran out; set num_threads to less than {num_processes} and run again"
            ) from error


def _start_worker(parent_pid: int) -> None:
    end_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the workers.


_started = cache(lambda analyser: analyser.start())
"""An analyser, started once in each process."""


def _split(analyser: Analyser, config: TokenizerConfig, block: bytes) -> bytes:
    analyse, prefix = _started(analyser), " " if config.add_dummy_prefix else ""
    lines = (prefix + "\n".join(morphemes(line, analyse, config)) for line in block.decode().split("\n")[:-1])
    return "".join(line + "\n" for line in lines).encode()


def rescore(model: ModelFile, sentences: Path, morphemes: Path) -> None:
    """Lower the scores of pieces that cross boundaries between morphemes, by the segmentation of the training text.

    Every piece lies within a morpheme somewhere, but its string may also be the end of one and the beginning of the
    next (って is a particle, and in 言|っ|て it crosses a boundary). A piece that crossed in some of its uses gets the
    score of one that is rarer by that factor; in several rounds, since other pieces take its place (numbers:
    `docs/tokenizers.md`). Only for `identity`: lengths of pieces are taken for lengths in the text.
    """
    size = min(MAX_RESCORED_BYTES, sentences.stat().st_size)
    normal = np.array([piece.type is PieceType.NORMAL for piece in model.pieces])
    lengths = np.array([len(piece.text_bytes) for piece in model.pieces], dtype=np.int64)
    lowest = min(piece.score for piece in model.pieces if piece.type is PieceType.NORMAL)
    with Progress("rescoring pieces that cross morphemes", total=ROUNDS * size, unit="B") as progress:
        for _ in range(ROUNDS):
            processor = sentencepiece.SentencePieceProcessor(model_proto=model.to_bytes())
            uses, crossings = np.zeros_like(lengths), np.zeros_like(lengths)
            for lines, boundaries in _blocks(sentences, morphemes, model.add_dummy_prefix):
                progress.advance(sum(len(line.encode()) + 1 for line in lines))
                ids = np.concatenate(processor.EncodeAsNumpy(lines, num_threads=1)).astype(np.int64)
                ends, starts = np.cumsum(lengths[ids]), np.cumsum(lengths[ids]) - lengths[ids]
                if processor.unk_id() in ids or ends[-1] != boundaries[-1]:
                    continue  # An unknown token, of a model without byte_fallback, may stand for any length.
                within = np.searchsorted(boundaries, ends, "left") - np.searchsorted(boundaries, starts, "right")
                uses += np.bincount(ids, minlength=len(uses))
                crossings += np.bincount(ids[within > 0], minlength=len(uses))
            kept = (uses - crossings + 0.5) / (uses + 0.5)
            changed = np.flatnonzero(normal & (crossings > 0)).tolist()
            model.set_scores({i: max(lowest, model.pieces[i].score + STRENGTH * math.log(kept[i])) for i in changed})


def _blocks(sentences: Path, morphemes: Path, has_prefix: bool) -> Iterator[tuple[list[str], list[int]]]:
    """Yield blocks of sentences, and the offsets in the joined block where morphemes end."""
    left = MAX_RESCORED_BYTES
    with open(sentences, "rb") as whole, open(morphemes, "rb") as parts:
        while left > 0 and (block := list(islice(whole, _BLOCK_LINES))):
            left -= sum(map(len, block))
            size, ends = sum(len(line) - 1 + has_prefix for line in block), [0]
            while ends[-1] < size:
                ends.append(ends[-1] + len(parts.readline()) - 1)
            yield [line[:-1].decode() for line in block], ends[1:]
