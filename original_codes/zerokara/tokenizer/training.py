"""The work of step 1: sample the corpus, train a tokenizer on the sample, measure the result.

In: the settings and the corpus. Out: the files of a tokenizer, made in a work folder inside the output folder and moved
to their names at the end. A SentencePiece model is byte for byte the same for the same sentences and number of threads.
It has <unk> 0, <s> 1, </s> 2, <pad> 3, the line end "\\n", the user's symbols, the 256 byte pieces where
`byte_fallback` is on, the learnt pieces, the reserved pieces, and last the sentinel tokens <extra_id_N> … <extra_id_0>.
SentencePiece's trainer would put these two first, so that they are appended after it.
Source: sentencepiece 0.2.3, `trainer_interface.cc` and the trainers of both model types.
"""

import os
import re
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerokara import tokenizer as names
from zerokara.base import manifest
from zerokara.base.durable import sync_folder, write_file, write_json
from zerokara.base.errors import RunError, UserError
from zerokara.base.progress import bytes_text, log
from zerokara.base.resources import available_cores
from zerokara.config.tokenizer_config import FEWEST_PIECES, NUM_BYTE_PIECES, TokenizerConfig
from zerokara.corpus.find import InputFile, check_unchanged
from zerokara.tokenizer import byte_level, report, sampling, trainer_process
from zerokara.tokenizer.model_file import NEWLINE, SCORE_STEP, ModelFile
from zerokara.tokenizer.morphemes import Analyser, rescore, segment
from zerokara.tokenizer.sampling import SampleBudget

MAX_THREADS = 32
SEEDS_PER_PIECE = 5
"""Candidates that unigram training starts with, for each piece of the vocabulary. On 20 MB of Japanese and 32,000
pieces, SentencePiece's default of a million and two estimates per pruning round took 70 s of CPU time, and this with
one estimate 26 s, for 0.6 % more bytes per token and 0.1 % more bits per byte of other text."""
_LEAST_SEEDS = 20_000
_TOO_SMALL = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")
"""SentencePiece's error with the number of pieces that the characters of the text and the fixed pieces need."""


def build(
    config: TokenizerConfig, files: Sequence[InputFile], budget: SampleBudget, analyser: Analyser | None, folder: Path
) -> tuple[sampling.SampleReport, int, report.Report]:
    """Make the files of a tokenizer in the work folder of `folder`; return both reports and the peak memory in bytes.

    A refusal leaves nothing in `folder`, a failure of the training leaves the log.

    Raises:
        UserError: no text, too many unreadable documents, a vocabulary that does not fit the text.
        RunError: the trainer or the analyser failed, or the corpus changed meanwhile.
    """
    work_dir, log_path = folder / names.WORK_NAME, folder / names.LOG_NAME
    _empty(work_dir)
    had_log = log_path.exists()
    try:
        sentences, model_path, peak = work_dir / "sentences.txt", work_dir / names.made_name(config.base_tokenizer), 0
        sources, sample = sampling.draw(config, files, sentences, budget.sample_bytes)
        check_unchanged(files)
        if config.base_tokenizer:
            for name, content in byte_level.train(config, sentences).items():
                write_file(work_dir / name, content)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # trained in this process
        else:
            morphemes = work_dir / "morphemes.txt" if analyser else None
            if analyser and morphemes:
                segment(config, analyser, sentences, morphemes, num_threads(config))
            write_file(log_path, names.LOG_HEADER)
            model, peak = train(config, sentences, work_dir, log_path, morphemes)
            write_file(model_path, model)
            escapes = str.maketrans({"\\": r"\\", "\n": r"\n", "\t": r"\t", "\r": r"\r"})
            lines = (f"{piece.text.translate(escapes)}\t{piece.score:.6g}\n" for piece in ModelFile(model).pieces)
            write_file(work_dir / names.VOCABULARY_NAME, "".join(lines))
        measured = report.make(model_path, config.input, sources, sentences, config.compare_with)
        write_json(work_dir / "report.json", measured.as_json())
        write_file(work_dir / "report.html", measured.page())
        return sample, peak, measured
    except BaseException as error:
        if isinstance(error, UserError) and not had_log:
            log_path.unlink(missing_ok=True)
        _empty(work_dir)
        # A model without a manifest is what a killed run left: there the folder stays, as the sign that it is ours.
        if (folder / manifest.NAME).exists() or not (folder / model_path.name).exists():
            discard_work(folder)
        raise


def move_into_place(folder: Path) -> list[Path]:
    """Give the files of the work folder their names in `folder`, where no manifest stands until it is written again."""
    (folder / manifest.NAME).unlink(missing_ok=True)
    made = [name for name in names.TOKENIZER_NAMES if (folder / names.WORK_NAME / name).exists()]
    for name in made:
        os.replace(folder / names.WORK_NAME / name, folder / name)
    for name in {*names.TOKENIZER_NAMES} - {*made}:  # of a tokenizer of the other kind, made here before
        (folder / name).unlink(missing_ok=True)
    sync_folder(folder)
    return [folder / name for name in made]


def discard_work(folder: Path) -> None:
    """Remove the work folder, once the manifest is written."""
    shutil.rmtree(folder / names.WORK_NAME, ignore_errors=True)


def _empty(folder: Path) -> None:
    """Make a folder, or empty the one that is there."""
    folder.mkdir(exist_ok=True)
    for left in folder.iterdir():
        left.unlink()


def num_threads(config: TokenizerConfig) -> int:
    return min(available_cores(), MAX_THREADS) if config.num_threads == "auto" else config.num_threads


def train(
    config: TokenizerConfig, sentences: Path, work_dir: Path, log_path: Path, morphemes: Path | None = None
) -> tuple[bytes, int]:
    """Train on a file of sentences; return the model, and the peak memory in bytes.

    The trainer's log is appended to `log_path`; `morphemes` is what `morphemes.segment` has written.

    Raises:
        UserError: there is no text, or the vocabulary is larger than the sample supports or too small for its
            characters; names the largest or the smallest size that works.
        RunError: SentencePiece failed.
    """
    size, appended = sentences.stat().st_size, config.num_appended_pieces
    model_path = work_dir / "trained.model"

    def run(vocab_size: int) -> tuple[ModelFile, int]:
        options = _options(config, vocab_size, morphemes is not None)
        with open(log_path, "a", encoding="utf-8") as file:
            code, last_line, peak = trainer_process.run(options, morphemes or sentences, model_path, vocab_size, file)
        if code < 0:
            raise RunError(
                f"SentencePiece's training was killed by signal {-code}, which most often means that memory ran out "
                f"({bytes_text(size)} of sentences); set sample_bytes to half of that and run again"
            )
        if code and not size:
            if config.sample_bytes != "auto":
                raise UserError(config.fault("sample_bytes", "is less than any passage of the text", "raise it"))
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
            reached = len(run(largest)[0].pieces) + appended
            if reached >= largest:
                break
            largest = reached
        rule = f"is larger than the sample ({bytes_text(size)} of text) supports; the largest that works is {largest}"
        more = "train on more text" if config.sample_bytes == "auto" else "raise sample_bytes"
        fewer = f"set {largest} or less, or " if largest >= FEWEST_PIECES else ""
        raise UserError(config.fault("vocab_size", rule, fewer + more))
    # It was off, since the text holds the spaces at the beginnings of sentences already.
    model.add_dummy_prefix = config.add_dummy_prefix
    if model.is_unigram:
        if morphemes and config.normalization_rule_name == "identity":
            rescore(model, sentences, morphemes)
        # The scores of BPE are whole numbers.
        model.set_scores({i: round(piece.score / SCORE_STEP) * SCORE_STEP for i, piece in enumerate(model.pieces)})
    model.append_controls(config.reserved_pieces)
    model.append_sentinels(config.extra_ids)
    return model.to_bytes(), peak


def _options(config: TokenizerConfig, vocab_size: int, has_morphemes: bool) -> dict[str, Any]:
    """Return the keyword arguments of SentencePiece's trainer."""
    # Characters that always get a piece. Those in the names of control and byte pieces: a text that spells such a name
    # is never the piece for SentencePiece, but would be for Hugging Face's Unigram where the alternative has an unknown
    # character. And white space that no text should lose, where no bytes can spell it.
    required = ["<unk>", "<s>", "</s>", "<pad>", *config.reserved_pieces]
    required += ["<extra_id_0123456789>"] if config.extra_ids else []
    if config.byte_fallback:
        required += [f"<0x{byte:02X}>" for byte in range(NUM_BYTE_PIECES)]
    elif not config.normalization_rule_name.startswith("nmt"):
        required.append("\t\r")
    return {
        "model_type": config.model_type,
        "vocab_size": vocab_size - config.num_appended_pieces,
        # A vocabulary smaller than asked for is reported by `train`, with the size that works.
        "hard_vocab_limit": False,
        "character_coverage": config.character_coverage,
        # A symbol of one character is its piece, and SentencePiece allows no second one.
        "required_chars": "".join(sorted(set("".join(required)) - set(config.user_defined_symbols))),
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
        "max_sentence_length": sampling.SENTENCE_BYTES,
        "seed_sentencepiece_size": max(_LEAST_SEEDS, SEEDS_PER_PIECE * vocab_size),
        "num_sub_iterations": 1,
        "shrinking_factor": 0.75,  # the default
        "num_threads": num_threads(config),
        "minloglevel": 0,
    }
