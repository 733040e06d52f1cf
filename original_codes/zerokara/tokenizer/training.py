"""Training sentences and settings → a SentencePiece model, byte for byte the same for the same sentences and threads.

Every model has <unk> 0, <s> 1, </s> 2, <pad> 3, the line end "\\n" as a piece of its own, the user's symbols, the 256
byte pieces where `byte_fallback` is on, the learnt pieces, the reserved pieces, and last the sentinel tokens
<extra_id_N> … <extra_id_0>. SentencePiece's trainer would put these two first, so that they are appended after it.
Source: sentencepiece 0.2.3, `trainer_interface.cc` and the trainers of both model types.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from zerokara.config.tokenizer_config import NUM_BYTE_PIECES, TokenizerConfig
from zerokara.errors import RunError, UserError
from zerokara.progress import Progress, bytes_text, log
from zerokara.resources import available_cores
from zerokara.tokenizer import trainer
from zerokara.tokenizer.model_file import NEWLINE, ModelFile, PieceType
from zerokara.tokenizer.sampling import SENTENCE_BYTES

MAX_THREADS = 32
SEEDS_PER_PIECE = 5
"""Candidates that unigram training starts with, for each piece of the vocabulary. On 20 MB of Japanese and 32,000
pieces, SentencePiece's default of a million and two estimates per pruning round took 70 s of CPU time, and this with
one estimate 26 s, for 0.6 % more bytes per token and 0.1 % more bits per byte of other text."""
_LEAST_SEEDS = 20_000
_TOO_SMALL = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")
"""Where SentencePiece says how many pieces the characters of the text and the fixed pieces need."""
ROUNDS, STRENGTH = 3, 2.0
"""Rounds of `rescore`, and its factor of the logarithm; 1 would take more rounds."""
MAX_RESCORED_BYTES = 5_000_000
"""Text of each round."""
_BLOCK_LINES = 32


def num_threads(config: TokenizerConfig) -> int:
    """The threads to train with."""
    return min(available_cores(), MAX_THREADS) if config.num_threads == "auto" else config.num_threads


def train(
    config: TokenizerConfig, sentences: Path, work_dir: Path, log_path: Path, morphemes: Path | None = None
) -> tuple[bytes, int]:
    """Train on a file of sentences; return the model, and the peak memory in bytes.

    The trainer's log is appended to `log_path`. `morphemes` holds the same text with one morpheme per line, for
    `pre_segment` (see `morphemes.segment`).

    Raises:
        UserError: there is no text, or the vocabulary is larger than the sample supports or too small for its
            characters; names the largest or the smallest size that works.
        RunError: SentencePiece failed.
    """
    size, appended = sentences.stat().st_size, config.num_appended_pieces
    model_path = work_dir / "trained.model"

    def run(vocab_size: int) -> tuple[ModelFile, int]:
        options = _options(config, vocab_size, morphemes is not None)
        with open(log_path, "a", encoding="utf-8") as log_file:
            code, last_line, peak = trainer.run(options, morphemes or sentences, model_path, vocab_size, log_file)
        if code < 0:
            raise RunError(
                f"SentencePiece's training was killed by signal {-code}, which most often means that memory ran out "
                f"({bytes_text(size)} of sentences); set sample_bytes to half of that and run again"
            )
        if code and not size:
            raise UserError(config.fault("input", "there is no text to train on in these files"))
        if code and (smallest := _TOO_SMALL.search(last_line)):
            least, fixed = int(smallest[1]) + appended, config.num_fixed_pieces
            rule = (
                f"is too small: the sample has {least - fixed:,} characters that get a piece each (character_coverage "
                f"= {config.character_coverage}), in addition to {fixed} fixed pieces; the smallest that works is "
                f"{least}"
            )
            remedy = f"set {least} or more (several times that is usual), or lower character_coverage"
            raise UserError(config.fault("vocab_size", rule, remedy))
        if code:
            raise RunError(f"SentencePiece's training failed: {last_line}; its log is {log_path}")
        return ModelFile(model_path.read_bytes()), peak

    model, peak = run(config.vocab_size)
    largest = len(model.pieces) + appended
    if largest < config.vocab_size:
        # For unigram a smaller target prunes more candidates, so that it is tried; BPE stops at the same merges.
        while model.is_unigram and largest > config.num_fixed_pieces + 1:
            log(
                f"  vocab_size = {config.vocab_size:,} is more than this text supports, which gave {largest:,} pieces; "
                f"training again to see whether {largest:,} works"
            )
            again = len(run(largest)[0].pieces) + appended
            if again >= largest:
                break
            largest = again
        rule = f"is larger than the sample ({bytes_text(size)} of text) supports; the largest that works is {largest}"
        raise UserError(config.fault("vocab_size", rule, f"set {largest} or less, or train on more text"))
    # It was off where the text holds the spaces at the beginnings of sentences already.
    model.add_dummy_prefix = config.add_dummy_prefix
    if model.is_unigram:
        if morphemes and config.normalization_rule_name == "identity":
            rescore(model, sentences, morphemes)
        model.round_scores()
    model.append_controls(config.reserved_pieces)
    model.append_sentinels(config.extra_ids)
    return model.to_bytes(), peak


def _options(config: TokenizerConfig, vocab_size: int, has_morphemes: bool) -> dict[str, Any]:
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
        "add_dummy_prefix": config.add_dummy_prefix and not has_morphemes,
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
        "shrinking_factor": trainer.SHRINKING,
        "num_threads": num_threads(config),
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


def rescore(model: ModelFile, sentences: Path, morphemes: Path) -> None:
    """Lower the scores of pieces that cross boundaries between morphemes, by the segmentation of the training text.

    Every piece lies within a morpheme somewhere, but its string may also be the end of one and the beginning of the
    next (って is a particle, and in 言|っ|て it crosses a boundary). A piece that crossed in some of its uses gets the
    score of one that is rarer by that factor; in several rounds, since other pieces take its place. No piece is lost,
    and where there is no better segmentation, it is used as before (numbers: `docs/tokenizers.md`). Only for text that
    the normaliser leaves as it is: lengths of pieces are taken for lengths in the text.
    """
    size = min(MAX_RESCORED_BYTES, sentences.stat().st_size)
    normal = np.array([piece.type is PieceType.NORMAL for piece in model.pieces])
    lengths = np.array([piece.num_bytes for piece in model.pieces], dtype=np.int64)
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
    """Blocks of sentences, and the offsets in them, joined, where morphemes end."""
    left = MAX_RESCORED_BYTES
    with open(sentences, "rb") as whole, open(morphemes, "rb") as parts:
        while left > 0 and (block := list(islice(whole, _BLOCK_LINES))):
            left -= sum(map(len, block))
            size, ends = sum(len(line) - 1 + has_prefix for line in block), [0]
            while ends[-1] < size:
                ends.append(ends[-1] + len(parts.readline()) - 1)
            yield [line[:-1].decode() for line in block], ends[1:]
