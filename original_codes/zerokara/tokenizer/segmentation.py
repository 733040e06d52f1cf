"""Training sentences → the same text with one morpheme per line, so that no piece is learnt across a boundary.

In: a file with one sentence per line, and an analyser. Out: a file whose lines, joined, are the sentences: nothing is
changed, and a space belongs to the morpheme that it precedes. Only the training sees it; the resulting model segments
plain text, without any analyser.

Why lines, and not SentencePiece's own `pretokenization_delimiter`: its trainer (0.2.3, `MakeSeedSentencePieces`) finds
candidates as substrings that occur before different characters, or at the end of a line. A morpheme that is always
followed by the delimiter is neither, so whole morphemes never become candidates; and the delimiters count as characters
in `character_coverage`. Equal lines are cheap: they are trained on once, with their number.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.errors import RunError
from zerokara.progress import Progress
from zerokara.resources import available_memory, end_with_parent
from zerokara.tokenizer.morphemes import Analyse, Analyser, boundaries

BLOCK_BYTES = 128 * 1024
"""Text that a process gets at a time."""
ALONE_BYTES = 1_000_000
"""Less text than this is analysed in this process: others would take longer to start."""
PROCESS_BYTES = 600_000_000
"""Memory of a process, which has its own dictionary (measured: Kiwi 550 MB, the others 120 to 140 MB)."""


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
    """Write the sentences with one morpheme per line, in their order.

    Raises:
        RunError: a process of the analysis died.
    """
    size = sentences.stat().st_size
    num_processes = 1 if size < ALONE_BYTES else max(1, min(num_processes, available_memory() // PROCESS_BYTES))
    label = f"splitting into morphemes with {analyser.name}"
    with open(target, "wb") as file, Progress(label, total=size, unit="B") as progress:
        blocks = _blocks(sentences)
        if num_processes == 1:
            analyse = analyser.start()
            for block in blocks:
                file.write(_split(block, analyse, config))
                progress.advance(len(block))
            return
        try:
            for block, done in _in_parallel(blocks, analyser, config, num_processes, progress):
                file.write(done)
                progress.advance(len(block))
        except BrokenProcessPool as error:
            raise RunError(
                f"a process of the morphological analysis ({analyser.name}) was killed, most often because "
                f"memory ran out; set num_threads to less than {num_processes} and run again"
            ) from error


def _in_parallel(
    blocks: Iterator[bytes], analyser: Analyser, config: TokenizerConfig, num_processes: int, progress: Progress
) -> Iterator[tuple[bytes, bytes]]:
    """Blocks and their morphemes, in order; only a few per process are in memory."""
    context = multiprocessing.get_context("spawn")
    waiting: deque[tuple[bytes, Future[bytes]]] = deque()
    with ProcessPoolExecutor(num_processes, context, _start_worker, (analyser, config, os.getpid())) as pool:
        for block in blocks:
            waiting.append((block, pool.submit(_split_in_worker, block)))
            if len(waiting) >= 4 * num_processes:
                yield _first(waiting, progress)
        while waiting:
            yield _first(waiting, progress)


def _first(waiting: deque[tuple[bytes, Future[bytes]]], progress: Progress) -> tuple[bytes, bytes]:
    block, future = waiting.popleft()
    while True:
        try:
            return block, future.result(timeout=1.0)
        except TimeoutError:
            progress.beat()


_ANALYSE: Analyse
_CONFIG: TokenizerConfig


def _start_worker(analyser: Analyser, config: TokenizerConfig, parent_pid: int) -> None:
    """Initialise a worker process: the analyser is started once in each."""
    global _ANALYSE, _CONFIG
    end_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the workers.
    _ANALYSE, _CONFIG = analyser.start(), config


def _split_in_worker(block: bytes) -> bytes:
    return _split(block, _ANALYSE, _CONFIG)


def _split(block: bytes, analyse: Analyse, config: TokenizerConfig) -> bytes:
    prefix = " " if config.add_dummy_prefix else ""
    lines = (prefix + "\n".join(morphemes(line, analyse, config)) for line in block.decode().split("\n")[:-1])
    return "".join(line + "\n" for line in lines).encode()


def _blocks(sentences: Path) -> Iterator[bytes]:
    """Whole lines, about `BLOCK_BYTES` at a time."""
    with open(sentences, "rb") as file:
        while lines := file.readlines(BLOCK_BYTES):
            yield b"".join(lines)
