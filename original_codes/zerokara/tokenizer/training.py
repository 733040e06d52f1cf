"""Training sentences and settings → a SentencePiece model, byte for byte the same for the same sentences and threads.

Every model has <unk> 0, <s> 1, </s> 2, <pad> 3, the line end "\\n" as a piece of its own, the user's symbols, the 256
byte pieces where `byte_fallback` is on, the learnt pieces, the reserved pieces, and last the sentinel tokens
<extra_id_N> … <extra_id_0>. SentencePiece's trainer would put these two first, so that they are appended after it.
Spaces are kept as they are.
Source: sentencepiece 0.2.3, `trainer_interface.cc` and the trainers of both model types.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from zerokara.config.tokenizer_config import NUM_BYTE_PIECES, TokenizerConfig
from zerokara.errors import Fault, RunError, UserError
from zerokara.progress import bytes_text, log
from zerokara.resources import available_cores
from zerokara.tokenizer.model_file import ModelFile
from zerokara.tokenizer.rescoring import rescore
from zerokara.tokenizer.sampling import SENTENCE_BYTES
from zerokara.tokenizer.trainer_log import SHRINKING, follow
from zerokara.tokenizer.units import NEWLINE

MAX_THREADS = 32
SEEDS_PER_PIECE = 5
"""Candidates that unigram training starts with, for each piece of the vocabulary. On 20 MB of Japanese and 32,000
pieces, SentencePiece's default of a million and two estimates per pruning round took 70 s of CPU time, and this with
one estimate 26 s, for 0.6 % more bytes per token and 0.1 % more bits per byte of other text."""
_LEAST_SEEDS = 20_000
_TOO_SMALL = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")
"""Where SentencePiece says how many pieces the characters of the text and the fixed pieces need."""


@dataclass(frozen=True)
class TrainedModel:
    """A new model, and the memory and threads of its training."""

    model: bytes
    peak_memory_bytes: int
    num_threads: int


def num_threads(config: TokenizerConfig) -> int:
    """The threads to train with."""
    if config.num_threads == "auto":
        return min(available_cores(), MAX_THREADS)
    return config.num_threads


def train(
    config: TokenizerConfig, sentences: Path, work_dir: Path, log_path: Path, morphemes: Path | None = None
) -> TrainedModel:
    """Train on a file of sentences; the trainer's log is appended to `log_path`.

    `morphemes` holds the same text with one morpheme per line (see `segmentation`), for `pre_segment`.

    Raises:
        UserError: there is no text, or the vocabulary is larger than the sample supports or too small for its
            characters; names the largest or the smallest size that works.
        RunError: SentencePiece failed.
    """
    threads = num_threads(config)
    with open(log_path, "a", encoding="utf-8") as trainer_log:
        job = _TrainingJob(config, sentences, morphemes, threads, work_dir, trainer_log)
        content, peak = job.run(config.vocab_size)
        model = ModelFile(content)
        if len(model.pieces) < config.vocab_size - config.num_appended_pieces:
            raise UserError(_too_large(job, model))
    # It was off where the text holds the spaces at the beginnings of sentences already.
    model.add_dummy_prefix = config.add_dummy_prefix
    if model.is_unigram:
        if morphemes and config.normalization_rule_name == "identity":
            rescore(model, sentences, morphemes)
        model.round_scores()
    model.append_controls(config.reserved_pieces)
    model.append_sentinels(config.extra_ids)
    return TrainedModel(model.to_bytes(), peak, threads)


def options_of(config: TokenizerConfig, vocab_size: int, threads: int) -> dict[str, Any]:
    """The keyword arguments of SentencePiece's trainer."""
    return {
        "model_type": config.model_type,
        "vocab_size": vocab_size - config.num_appended_pieces,
        # A vocabulary smaller than asked for is reported by `train`, with the size that works.
        "hard_vocab_limit": False,
        "character_coverage": config.character_coverage,
        "required_chars": _required_characters(config),
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
        "num_sub_iterations": 1,
        "shrinking_factor": SHRINKING,
        "num_threads": threads,
        "minloglevel": 0,
    }


def _required_characters(config: TokenizerConfig) -> str:
    """The characters that always get a piece.

    These are the characters in the names of control and byte pieces: text may spell such a name, SentencePiece never
    takes it for the piece, but Hugging Face's Unigram would where the alternative has an unknown character. And white
    space that no text should lose, where no bytes can spell it.
    """
    names = ["<unk>", "<s>", "</s>", "<pad>", *config.reserved_pieces]
    names += ["<extra_id_0123456789>"] if config.extra_ids else []
    if config.byte_fallback:
        names += [f"<0x{byte:02X}>" for byte in range(NUM_BYTE_PIECES)]
    elif not config.normalization_rule_name.startswith("nmt"):
        names.append("\t\r")
    # A symbol of one character is its piece, and SentencePiece allows no second one.
    return "".join(sorted(set("".join(names)) - set(config.user_defined_symbols)))


@dataclass(frozen=True)
class _TrainingJob:
    """What a training needs beside the size of the vocabulary."""

    config: TokenizerConfig
    sentences: Path
    morphemes: Path | None
    threads: int
    work_dir: Path
    log: IO[str]

    def run(self, vocab_size: int) -> tuple[bytes, int]:
        """Train once; return the model and the peak memory in bytes."""
        job, model = self.work_dir / "job.json", self.work_dir / "trained.model"
        options = options_of(self.config, vocab_size, self.threads)
        if self.morphemes:
            options["add_dummy_prefix"] = False
        lines = str(self.morphemes or self.sentences)
        description = {"sentences": lines, "model": str(model), "options": options, "parent": os.getpid()}
        job.write_text(json.dumps(description), encoding="utf-8")
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
            last_line = follow(process.stderr, self.config.model_type, vocab_size, self.log)
            code = process.wait()
            printed = process.stdout.read()
        finally:
            process.kill()
            process.communicate()
        if code < 0:
            raise RunError(
                f"SentencePiece's training was killed by signal {-code}, which most often means that memory ran out "
                f"({self.text_size()} of sentences); set sample_bytes to half of that and run again"
            )
        if code and not self.sentences.stat().st_size:
            raise UserError(self.config.fault("input", "there is no text to train on in these files"))
        if code and (smallest := _TOO_SMALL.search(last_line)):
            raise UserError(_too_small(self.config, int(smallest[1]) + self.config.num_appended_pieces))
        if code:
            raise RunError(f"SentencePiece's training failed: {last_line}; its log is {self.log.name}")
        return model.read_bytes(), int(printed)

    def text_size(self) -> str:
        """The size of the sentences, to be read."""
        return bytes_text(self.sentences.stat().st_size)


def _too_large(job: _TrainingJob, model: ModelFile) -> Fault:
    """The fault, with the largest size that works.

    For unigram that is found by training again, since a smaller target prunes more candidates; BPE stops at the same
    merges.
    """
    config = job.config
    largest = len(model.pieces) + config.num_appended_pieces
    while config.model_type == "unigram" and largest > config.num_fixed_pieces + 1:
        log(
            f"  vocab_size = {config.vocab_size:,} is more than this text supports, which gave {largest:,} pieces; "
            f"training again to see whether {largest:,} works"
        )
        content, _ = job.run(largest)
        again = len(ModelFile(content).pieces) + config.num_appended_pieces
        if again >= largest:
            break
        largest = again
    rule = f"is larger than the sample ({job.text_size()} of text) supports; the largest that works is {largest}"
    return config.fault("vocab_size", rule, f"set {largest} or less, or train on more text")


def _too_small(config: TokenizerConfig, smallest: int) -> Fault:
    fixed = config.num_fixed_pieces
    rule = (
        f"is too small: the sample has {smallest - fixed:,} characters that get a piece each (character_coverage = "
        f"{config.character_coverage}), in addition to {fixed} fixed pieces; the smallest that works is {smallest}"
    )
    remedy = f"set {smallest} or more (several times that is usual), or lower character_coverage"
    return config.fault("vocab_size", rule, remedy)
