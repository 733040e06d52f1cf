"""Training sentences and settings → a SentencePiece model, the same byte for byte for the same sentences and threads.

What every model has: <unk> 0, <s> 1, </s> 2, <pad> 3, the line end "\\n" as a piece of its own, the user's symbols,
the 256 byte pieces where `byte_fallback` is on, the learnt pieces, and last the sentinels <extra_id_N> … <extra_id_0>,
which SentencePiece's trainer would put first and which are appended after it. Spaces are kept as they are.
Source: sentencepiece 0.2.3, `trainer_interface.cc` and the trainers of both model types.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import sentencepiece

from zerokara.config import TokenizerConfig
from zerokara.config.tokenizer_config import NUM_BYTE_PIECES, NUM_CONTROL_PIECES
from zerokara.errors import Fault, RunError, UserError
from zerokara.progress import Progress, bytes_text
from zerokara.tokenizer.encoder import NEWLINE, SPACE_MARK
from zerokara.tokenizer.model_file import Kind, ModelFile, Piece
from zerokara.tokenizer.sampling import SENTENCE_BYTES

MAX_THREADS = 32
_BOUNDARY = "\x1f"
"""What stands for a user symbol inside the trainer (sentencepiece 0.2.3; up to 0.2.1 the tab): never a piece."""
_SEED_PIECES = 1_000_000
_SHRINKING = 0.75
"""Share of the candidates that each pruning round keeps (SentencePiece's default `shrinking_factor`)."""
_EM_LINE = re.compile(r"EM sub_iter=\d+ size=(\d+)")
_MERGE_LINE = re.compile(r"Added: freq=\d+ size=(\d+)")


@dataclass(frozen=True)
class Trained:
    """A new model, and what its making took."""

    model: bytes
    peak_memory_bytes: int
    num_threads: int


def check(config: TokenizerConfig) -> None:
    """Refuse settings that SentencePiece or an exact Hugging Face tokenizer cannot serve.

    Raises: UserError with every fault.
    """
    faults = []
    for symbol in config.user_defined_symbols:
        if any(character.isspace() or character in (SPACE_MARK, "\u2585", "\0") for character in symbol):
            rule = f"must not hold {symbol!r}: a symbol has no spaces, and neither U+2581, U+2585 nor NUL"
            faults.append(config.fault("user_defined_symbols", rule))
        if re.fullmatch("<0x[0-9A-Fa-f]{2}>", symbol):
            faults.append(config.fault("user_defined_symbols", f"must not hold {symbol!r}, the name of a byte piece"))
    if config.add_dummy_prefix and config.user_defined_symbols:
        rule = "cannot stand together with user_defined_symbols: the Hugging Face tokenizer could not be exact"
        faults.append(config.fault("add_dummy_prefix", rule, "leave it false"))
    if faults:
        raise UserError(faults)


def num_threads(config: TokenizerConfig) -> int:
    """The threads to train with."""
    if config.num_threads == "auto":
        return min(len(os.sched_getaffinity(0)), MAX_THREADS)
    return config.num_threads


def train(config: TokenizerConfig, sentences: Path, work_dir: Path, log_path: Path) -> Trained:
    """Train on a file of sentences; SentencePiece's own words go to `log_path`.

    Raises:
        UserError: the vocabulary is larger than the sample can give, or too small for its characters; names the
            largest or the smallest size that works.
        RunError: SentencePiece failed.
    """
    _check_characters(config, sentences)
    threads = num_threads(config)
    with open(log_path, "w", encoding="utf-8") as log:
        content, peak = _run(config, config.vocab_size, sentences, threads, work_dir, log)
        model = ModelFile(content)
        if len(model.pieces) < _learnt_size(config, config.vocab_size):
            raise UserError(_too_large(config, model, sentences, threads, work_dir, log))
    if model.is_unigram:
        model.round_scores()
    model.append([Piece(f"<extra_id_{i}>", 0.0, Kind.CONTROL) for i in reversed(range(config.extra_ids))])
    return Trained(model.to_bytes(), peak, threads)


def _learnt_size(config: TokenizerConfig, vocab_size: int) -> int:
    return vocab_size - config.extra_ids


def num_fixed(config: TokenizerConfig) -> int:
    """The pieces that are not learnt: control, line end, user symbols, bytes, sentinels."""
    fixed = NUM_CONTROL_PIECES + 1 + len(config.user_defined_symbols) + config.extra_ids
    return fixed + (NUM_BYTE_PIECES if config.byte_fallback else 0)


def options_of(config: TokenizerConfig, vocab_size: int, threads: int) -> dict[str, Any]:
    """The settings as SentencePiece's trainer calls them."""
    return {
        "model_type": config.model_type,
        "vocab_size": _learnt_size(config, vocab_size),
        # A smaller vocabulary than asked for is told by us, with the size that works.
        "hard_vocab_limit": False,
        "character_coverage": config.character_coverage,
        "required_chars": required_characters(config),
        "byte_fallback": config.byte_fallback,
        "split_digits": config.split_digits,
        "normalization_rule_name": config.normalization_rule_name,
        "add_dummy_prefix": config.add_dummy_prefix,
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "user_defined_symbols": [NEWLINE, *config.user_defined_symbols],
        "unk_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "pad_id": 3,
        "max_sentence_length": SENTENCE_BYTES,
        "seed_sentencepiece_size": max(_SEED_PIECES, 2 * vocab_size),
        "num_threads": threads,
        "minloglevel": 0,
    }


def required_characters(config: TokenizerConfig) -> str:
    """The characters that always get a piece each.

    Those of which the names of control and byte pieces are made: text may spell such a name, SentencePiece never takes
    it for the piece, but Hugging Face's Unigram would where the other reading has an unknown character. And the white
    space that no text should lose, where no bytes can spell it.
    """
    names = ["<unk>", "<s>", "</s>", "<pad>", *(["<extra_id_0123456789>"] if config.extra_ids else [])]
    names += [f"<0x{byte:02X}>" for byte in range(NUM_BYTE_PIECES)] if config.byte_fallback else []
    names += [] if config.byte_fallback else ["\t\r" if not config.normalization_rule_name.startswith("nmt") else ""]
    return "".join(sorted(set("".join(names))))


def _run(
    config: TokenizerConfig, vocab_size: int, sentences: Path, threads: int, work_dir: Path, log: IO[str]
) -> tuple[bytes, int]:
    """Train once; gives the model and the peak memory in bytes."""
    job, model = work_dir / "job.json", work_dir / "trained.model"
    options = options_of(config, vocab_size, threads)
    job.write_text(json.dumps({"sentences": str(sentences), "model": str(model), "options": options}), encoding="utf-8")
    source_root = str(Path(__file__).resolve().parents[2])
    paths = [source_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-m", "zerokara.tokenizer.trainer_process", str(job)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        encoding="utf-8",
        errors="backslashreplace",
    )
    assert process.stderr is not None and process.stdout is not None
    try:
        last_words = _follow(process.stderr, config, vocab_size, log)
        code = process.wait()
        said = process.stdout.read()
    finally:
        process.kill()
        process.communicate()
    if code < 0:
        raise RunError(
            f"SentencePiece's training was ended by signal {-code}, which most often means that memory ran out "
            f"({bytes_text(sentences.stat().st_size)} of sentences); set sample_bytes to half of that and run again"
        )
    if code:
        raise RunError(f"SentencePiece's training failed: {last_words}; its whole log is {log.name}")
    return model.read_bytes(), int(said)


def _follow(words: IO[str], config: TokenizerConfig, vocab_size: int, log: IO[str]) -> str:
    """Write the trainer's words to the log and show the progress that they tell; gives the last line."""
    last, rounds_known = "", False
    label = f"training {config.model_type}"
    total = float(vocab_size) if config.model_type == "bpe" else None
    with Progress(label, total=total, unit="piece" if total else "round") as progress:
        done = 0
        for line in words:
            log.write(line)
            last = line.strip() or last
            if match := _MERGE_LINE.search(line):
                progress.advance(int(match[1]) - done)
                done = int(match[1])
            elif match := _EM_LINE.search(line):
                if not rounds_known:
                    rounds = np.log(max(1.0, int(match[1]) / (1.1 * vocab_size))) / -np.log(_SHRINKING)
                    progress.total, rounds_known = 2 * (int(np.ceil(rounds)) + 1), True
                progress.note(candidates=f"{int(match[1]):,}")
                progress.advance(1)
    log.flush()
    return last


def _too_large(
    config: TokenizerConfig, model: ModelFile, sentences: Path, threads: int, work_dir: Path, log: IO[str]
) -> Fault:
    """The fault, with the largest size that works: tried, since a smaller aim prunes more candidates."""
    largest = len(model.pieces) + config.extra_ids
    while largest > num_fixed(config) + 1:
        content, _ = _run(config, largest, sentences, threads, work_dir, log)
        again = len(ModelFile(content).pieces) + config.extra_ids
        if again >= largest:
            break
        largest = again
    size = bytes_text(sentences.stat().st_size)
    rule = f"is larger than the sample ({size} of text) can give; the largest that works is {largest}"
    return config.fault("vocab_size", rule, f"set {largest} or less, or train on more text")


def _check_characters(config: TokenizerConfig, sentences: Path) -> None:
    needed, fixed = num_required_characters(config, sentences), num_fixed(config)
    if not needed:
        raise UserError(config.fault("input", "there is no text to train on in these files"))
    if config.vocab_size < needed + fixed:
        rule = (
            f"is too small: the sample has {needed:,} characters that get a piece each (character_coverage = "
            f"{config.character_coverage}), beside {fixed} fixed pieces; the smallest that works is {needed + fixed}"
        )
        remedy = f"set {needed + fixed} or more (several times that is usual), or lower character_coverage"
        raise UserError(config.fault("vocab_size", rule, remedy))


def num_required_characters(config: TokenizerConfig, sentences: Path) -> int:
    """How many characters get a piece: the most frequent, until their share reaches `character_coverage`.

    As SentencePiece does it (`TrainerInterface::LoadSentences`): in float32, the boundary mark counted but left out.
    """
    counts = np.zeros(0x110000, dtype=np.int64)
    for text in _normalized_blocks(config, sentences):
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        counts += np.bincount(codes, minlength=len(counts))
    counts[ord("\n")] = counts[0] = 0
    total = int(counts.sum())
    if not total:
        return 0
    required = np.zeros(len(counts), dtype=bool)
    required[[ord(character) for character in required_characters(config)]] = True
    present = np.flatnonzero(required | (counts > 0))
    # The required ones first, then by falling count, among equals by rising code point, as SentencePiece's `Sorted`.
    ordered = present[np.lexsort((present, -counts[present], ~required[present]))]
    before = np.cumsum(counts[ordered]) - counts[ordered]
    reached = (before / total).astype(np.float32) >= np.float32(config.character_coverage)
    num = int(np.argmax(reached)) if reached.any() else len(ordered)
    return num - int(ord(_BOUNDARY) in ordered[:num])


def _normalized_blocks(config: TokenizerConfig, sentences: Path) -> Iterator[str]:
    """The sentences as the trainer sees them, some thousand at a time, each user symbol as one boundary mark."""
    normalizer = sentencepiece.SentencePieceNormalizer(
        rule_name=config.normalization_rule_name,
        add_dummy_prefix=config.add_dummy_prefix,
        remove_extra_whitespaces=False,
        escape_whitespaces=True,
    )
    symbols = re.compile("|".join(map(re.escape, sorted(config.user_defined_symbols, key=len, reverse=True))) or "(?!)")
    with open(sentences, encoding="utf-8", newline="\n") as file:
        while lines := file.readlines(4 * 1024 * 1024):
            if config.normalization_rule_name == "identity":
                prefix = SPACE_MARK if config.add_dummy_prefix else ""
                text = "".join(prefix + line for line in lines).replace(" ", SPACE_MARK)
            else:
                text = "\n".join(normalizer.normalize(line[:-1]) for line in lines)
            yield symbols.sub(_BOUNDARY, text)
