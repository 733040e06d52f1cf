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
from zerokara.progress import bytes_text
from zerokara.resources import available_cores
from zerokara.tokenizer.encoder import SPACE_MARK
from zerokara.tokenizer.model_file import ModelFile
from zerokara.tokenizer.rescoring import rescore
from zerokara.tokenizer.sampling import SENTENCE_BYTES
from zerokara.tokenizer.trainer_log import NUM_SUB_ITERATIONS, SHRINKING, follow
from zerokara.tokenizer.units import NEWLINE

MAX_THREADS = 32
_BOUNDARY = "\x1f"
"""What stands for a user symbol inside the trainer (sentencepiece 0.2.3; up to 0.2.1 the tab): never a piece."""
SEEDS_PER_PIECE = 5
"""Candidates that the training of a unigram model begins with, for each piece of the vocabulary. On 20 MB of Japanese
and 32,000 pieces, SentencePiece's default of a million and two estimates between prunings took 70 s of CPU time, and
this with one estimate 26 s, for 0.6 % more bytes a token and 0.1 % more bits a byte of other text."""
_LEAST_SEEDS = 20_000


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
        return min(available_cores(), MAX_THREADS)
    return config.num_threads


def train(
    config: TokenizerConfig, sentences: Path, work_dir: Path, log_path: Path, morphemes: Path | None = None
) -> Trained:
    """Train on a file of sentences; SentencePiece's own words are added to `log_path`.

    `morphemes` holds the same text with a line for each morpheme (see `segmentation`), for `pre_segment`.

    Raises:
        UserError: the vocabulary is larger than the sample can give, or too small for its characters; names the
            largest or the smallest size that works.
        RunError: SentencePiece failed.
    """
    threads = num_threads(config)
    with open(log_path, "a", encoding="utf-8") as log:
        job = _Job(config, sentences, morphemes, threads, work_dir, log)
        content, peak = job.run(config.vocab_size)
        model = ModelFile(content)
        if len(model.pieces) < _learnt_size(config, config.vocab_size):
            raise UserError(_too_large(job, model))
    # It was off where the spaces at the beginnings of sentences stand in the text already.
    model.add_dummy_prefix = config.add_dummy_prefix
    if model.is_unigram:
        if morphemes and config.normalization_rule_name == "identity":
            rescore(model, sentences, morphemes)
        model.round_scores()
    model.append_sentinels(config.extra_ids)
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
        "seed_sentencepiece_size": max(_LEAST_SEEDS, SEEDS_PER_PIECE * vocab_size),
        "num_sub_iterations": NUM_SUB_ITERATIONS,
        "shrinking_factor": SHRINKING,
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


@dataclass(frozen=True)
class _Job:
    """All that a training needs beside the size of the vocabulary."""

    config: TokenizerConfig
    sentences: Path
    morphemes: Path | None
    threads: int
    work_dir: Path
    log: IO[str]

    def run(self, vocab_size: int) -> tuple[bytes, int]:
        """Train once; gives the model and the peak memory in bytes."""
        job, model = self.work_dir / "job.json", self.work_dir / "trained.model"
        options = options_of(self.config, vocab_size, self.threads)
        if self.morphemes:
            options["add_dummy_prefix"] = False
        lines = str(self.morphemes or self.sentences)
        order = {"sentences": lines, "model": str(model), "options": options, "parent": os.getpid()}
        job.write_text(json.dumps(order), encoding="utf-8")
        source_root = str(Path(__file__).resolve().parents[2])
        paths = [source_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "zerokara.tokenizer.trainer_process", str(job)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        assert process.stderr is not None and process.stdout is not None
        try:
            last_words = follow(process.stderr, self.config.model_type, vocab_size, self.log)
            code = process.wait()
            said = process.stdout.read()
        finally:
            process.kill()
            process.communicate()
        if code < 0:
            raise RunError(
                f"SentencePiece's training was ended by signal {-code}, which most often means that memory ran out "
                f"({self.text_size()} of sentences); set sample_bytes to half of that and run again"
            )
        if code:
            _check_characters(self.config, self.sentences)
            raise RunError(f"SentencePiece's training failed: {last_words}; its whole log is {self.log.name}")
        return model.read_bytes(), int(said)

    def text_size(self) -> str:
        """The size of the sentences, as it is told."""
        return bytes_text(self.sentences.stat().st_size)


def _too_large(job: _Job, model: ModelFile) -> Fault:
    """The fault, with the largest size that works: tried, since a smaller aim prunes more candidates."""
    config = job.config
    largest = len(model.pieces) + config.extra_ids
    while largest > num_fixed(config) + 1:
        content, _ = job.run(largest)
        again = len(ModelFile(content).pieces) + config.extra_ids
        if again >= largest:
            break
        largest = again
    rule = f"is larger than the sample ({job.text_size()} of text) can give; the largest that works is {largest}"
    return config.fault("vocab_size", rule, f"set {largest} or less, or train on more text")


def _check_characters(config: TokenizerConfig, sentences: Path) -> None:
    """Tell why SentencePiece refused to begin, if it is one of the two things for which it does, with the numbers."""
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
        content = np.frombuffer(text.encode(), dtype=np.uint8)
        counts[:128] += np.bincount(content, minlength=256)[:128]
        # What is not ASCII is spelt in bytes above it, so that it can be taken out whole.
        others = content[content >= 128].tobytes().decode()
        found = np.bincount(np.frombuffer(others.encode("utf-32-le"), dtype=np.uint32))
        counts[: len(found)] += found
    counts[ord(SPACE_MARK)] += counts[ord(" ")]
    counts[ord(" ")] = 0
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
    symbols = re.compile("|".join(map(re.escape, sorted(config.user_defined_symbols, key=len, reverse=True))))
    with open(sentences, "rb") as file:
        while block := file.read(4 * 1024 * 1024) + file.readline():
            text = block.decode()
            if config.normalization_rule_name != "identity":
                text = "\n".join(normalizer.normalize(line) for line in text.split("\n")[:-1])
            elif config.add_dummy_prefix:
                text = SPACE_MARK + text[:-1].replace("\n", "\n" + SPACE_MARK)
            yield symbols.sub(_BOUNDARY, text) if config.user_defined_symbols else text
