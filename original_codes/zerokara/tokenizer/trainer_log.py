"""The log of SentencePiece's trainer → progress: the phase of the training, and how far it is.

In: the lines of the log (sentencepiece 0.2.3). The trainer is silent for minutes in some phases (suffixes, pruning);
the progress then shows every few seconds how long the training has taken.
"""

from __future__ import annotations

import math
import os
import re
import select
from collections.abc import Iterator
from typing import IO

from zerokara.progress import Progress

SHRINKING = 0.75
"""Share of the candidates that each pruning round keeps (SentencePiece's default `shrinking_factor`)."""
DESIRED_SHARE = 1.1
"""Pruning ends at this many times the vocabulary (`unigram_model_trainer.cc`)."""
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
"""Parts of the lines with which a phase begins, in their order."""
_PHASE = re.compile("|".join(map(re.escape, _PHASES)))
_EM_LINE = re.compile(r"EM sub_iter=\d+ size=(\d+)")
"""One estimate precedes each pruning round (`num_sub_iterations` is 1)."""
_MERGE_LINE = re.compile(r"Added: freq=\d+ size=(\d+)")
BEAT_SECONDS = 1.0


def follow(trainer_output: IO[bytes], model_type: str, vocab_size: int, log: IO[str]) -> str:
    """Copy the trainer's output to the log and show its progress; return the last line."""
    last, done = "", 0
    is_bpe = model_type == "bpe"
    total = float(vocab_size) if is_bpe else None
    with Progress(f"training {model_type}", total=total, unit="piece" if is_bpe else "round") as progress:
        for line in _lines(trainer_output):
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
                    progress.expect(num_rounds(int(match[1]), vocab_size))
                progress.note(candidates=f"{int(match[1]):,}")
                progress.advance(1)
                progress.phase("pruning")
            if match := _PHASE.search(line):
                progress.phase(_PHASES[match[0]])
    log.flush()
    return last


def num_rounds(candidates: int, vocab_size: int) -> int:
    """Pruning rounds, about, until so many candidates are pruned to the vocabulary."""
    return max(1, math.ceil(math.log(max(1.0, candidates / (DESIRED_SHARE * vocab_size))) / -math.log(SHRINKING)))


def _lines(trainer_output: IO[bytes]) -> Iterator[str]:
    """The lines as they come, and an empty string for every second without one."""
    rest = b""
    while True:
        if not select.select([trainer_output], [], [], BEAT_SECONDS)[0]:
            yield ""
            continue
        if not (content := os.read(trainer_output.fileno(), 65536)):
            break
        *lines, rest = (rest + content).split(b"\n")
        yield from (line.decode(errors="backslashreplace") + "\n" for line in lines)
    if rest:
        yield rest.decode(errors="backslashreplace")
