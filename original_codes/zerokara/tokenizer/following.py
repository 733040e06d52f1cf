"""What SentencePiece's trainer says while it works → progress: the part of the work that it is at, and how far.

In: the lines of its log (sentencepiece 0.2.3). It is silent for minutes in some parts (suffixes, pruning); the progress
then shows every few seconds how long the work has been going on.
"""

from __future__ import annotations

import math
import os
import re
import select
from collections.abc import Iterator
from typing import IO

from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.progress import Progress

NUM_SUB_ITERATIONS = 1
"""Estimates of the probabilities before each pruning."""
SHRINKING = 0.75
"""Share of the candidates that each pruning keeps (SentencePiece's default `shrinking_factor`)."""
DESIRED_SHARE = 1.1
"""The pruning ends at this many times the vocabulary (`unigram_model_trainer.cc`)."""
_PHASES = {
    "Starts training": "reading the sentences",
    "Normalizing sentences": "counting characters",
    "Start processing": "sorting all suffixes for candidates",
    "Filtering and sorting": "choosing candidates",
    "Tokenizing input sentences": "gathering equal words",
    "EM training": "estimating probabilities",
    "PruneUnreachableSentencePieces pruned": "finishing",
    "Added: freq": "merging",
}
"""Parts of the lines that tell the beginning of a phase, in the order in which they come."""
_PHASE = re.compile("|".join(map(re.escape, _PHASES)))
_EM_LINE = re.compile(r"EM sub_iter=(\d+) size=(\d+)")
_MERGE_LINE = re.compile(r"Added: freq=\d+ size=(\d+)")
_BEAT_SECONDS = 1.0


def follow(words: IO[bytes], config: TokenizerConfig, vocab_size: int, log: IO[str]) -> str:
    """Write the trainer's words to the log and show the progress that they tell; gives the last line."""
    last, done = "", 0
    is_bpe = config.model_type == "bpe"
    total = float(vocab_size) if is_bpe else None
    with Progress(f"training {config.model_type}", total=total, unit="piece" if is_bpe else "round") as progress:
        for line in _lines(words):
            if not line:
                progress.beat()
                continue
            log.write(line)
            last = line.strip() or last
            if match := _MERGE_LINE.search(line):
                progress.advance(int(match[1]) - done)
                done = int(match[1])
            elif match := _EM_LINE.search(line):
                if progress.total is None:
                    progress.expect(num_rounds(int(match[2]), vocab_size))
                progress.note(candidates=f"{int(match[2]):,}")
                progress.advance(1)
                is_last = int(match[1]) + 1 == NUM_SUB_ITERATIONS
                progress.phase("pruning" if is_last else "estimating probabilities")
            if match := _PHASE.search(line):
                progress.phase(_PHASES[match[0]])
    log.flush()
    return last


def num_rounds(candidates: int, vocab_size: int) -> int:
    """How often probabilities will be estimated until so many candidates are down to the vocabulary."""
    prunings = math.ceil(math.log(max(1.0, candidates / (DESIRED_SHARE * vocab_size))) / -math.log(SHRINKING))
    return NUM_SUB_ITERATIONS * max(1, prunings)


def _lines(words: IO[bytes]) -> Iterator[str]:
    """The lines as they come, and an empty text for every second without one."""
    rest = b""
    while True:
        if not select.select([words], [], [], _BEAT_SECONDS)[0]:
            yield ""
            continue
        if not (content := os.read(words.fileno(), 65536)):
            break
        *lines, rest = (rest + content).split(b"\n")
        yield from (line.decode(errors="backslashreplace") + "\n" for line in lines)
    if rest:
        yield rest.decode(errors="backslashreplace")
