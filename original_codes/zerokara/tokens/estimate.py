"""Estimate of step 2 from a sample of the corpus: the encoder to use, expected tokens, disk space."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerokara.base.errors import UserError
from zerokara.base.progress import bytes_text
from zerokara.base.resources import free_bytes
from zerokara.config.data import DataSettings
from zerokara.corpus.find import InputFile
from zerokara.corpus.read import Document, Range, is_one_document, read, total_plain_bytes
from zerokara.tokenizer.compatibility import check_exportable
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.fast_encoder import EncoderChoice, choose
from zerokara.tokens import merge
from zerokara.tokens.indexed import DOCUMENT_BYTES, TokenPaths, dtype_for

SAMPLE_PLACES = 8
"""Number of places that are sampled: beginnings of files, and of fewer files further places."""
PLACE_CHARACTERS, PLACE_BAD_LINES = 64 * 1024, 5000
"""Text, and bad lines, after which a place ends."""


@dataclass(frozen=True)
class TokenEstimate:
    """Expected size of the result; within some ten percent if the files resemble each other."""

    tokens: int
    output_bytes: int
    """Bytes of the .bin files."""
    documents: int
    loss: str = ""
    """Share of the sampled documents that do not come back when their ids are decoded; empty if all do."""


def prepare(
    config: DataSettings, files: Sequence[InputFile], encoder: Encoder
) -> tuple[EncoderChoice, TokenEstimate, list[str]]:
    """Choose and prove the fastest encoder on a sample of the corpus, and estimate tokens and disk space.

    The third is the sample.

    Raises UserError if no export could be proved with the tokenizer, or the disk is too small.
    """
    check_exportable(encoder)
    texts, sampled_bytes = sample_corpus(config, files)
    choice = choose(encoder, texts)
    expected = estimate_tokens(encoder, texts, total_plain_bytes(files, config.text_field) / max(1, sampled_bytes))
    if others := [file for file in files if not is_one_document(file, config.txt_document)]:
        lines, line_bytes = sample_corpus(config, others)  # of the rest lines are sampled, too
        num_lines = len(lines) * total_plain_bytes(others, config.text_field) / max(1, line_bytes)
    expected = replace(expected, documents=len(files) - len(others) + round(num_lines if others else 0))
    check_disk_space(config, expected)
    return choice, expected, texts


def sample_corpus(config: DataSettings, files: Sequence[InputFile]) -> tuple[list[str], int]:
    """Read documents from up to `SAMPLE_PLACES` places, within some milliseconds each.

    Return them, and the unpacked bytes that were read for them (`Document.bytes`).
    """
    chosen, texts, sampled_bytes = [file for file in files if file.bytes], list[str](), 0
    chosen = chosen[:: max(1, len(chosen) // SAMPLE_PLACES)]
    places_a_file = max(1, SAMPLE_PLACES // max(1, len(chosen)))
    for file in chosen:
        # To reach the middle of a compressed file, everything before it would have to be unpacked.
        can_seek = file.compression == "none" and file.format != "parquet"
        for place in range(places_a_file if can_seek and file.bytes > places_a_file * PLACE_CHARACTERS else 1):
            characters = bad_lines = 0
            for item in read(Range(file, place * file.bytes // places_a_file), config.text_field, "line"):
                sampled_bytes += item.bytes
                if isinstance(item, Document):
                    texts.append(item.text)
                    characters += len(item.text)
                else:
                    bad_lines += 1
                if characters >= PLACE_CHARACTERS or bad_lines >= PLACE_BAD_LINES:
                    break
    return texts, sampled_bytes


def estimate_tokens(encoder: Encoder, texts: Sequence[str], times: float) -> TokenEstimate:
    """Encode a sample of the corpus, which is so many `times` as large."""
    all_ids = encoder.encode_many(texts)
    tokens = round(times * sum(len(ids) + 1 + (encoder.start_id >= 0) for ids in all_ids))
    changed, loss = [text for text, ids in zip(texts, all_ids, strict=True) if encoder.decode(ids) != text], ""
    if changed:
        share = f"{len(changed) / len(texts):.1%} of {len(texts):,} sampled documents"
        loss = f"{share} do not decode to exactly what they were, first {changed[0][:40]!r}"
    return TokenEstimate(tokens, tokens * dtype_for(encoder.vocab_size).itemsize, round(times * len(texts)), loss)


def check_disk_space(config: DataSettings, expected: TokenEstimate) -> None:
    """Raise UserError if the work will not fit on the disk; not of a run that was begun, which has a part there."""
    folder = TokenPaths(config.output_prefix).work_folder
    free, needed = free_bytes(folder), peak_bytes(expected)
    if free < needed and not any(folder.glob("*-*.json")):
        rule = f"needs about {bytes_text(needed)}, and {bytes_text(free)} are free at {folder.absolute().parent}"
        raise UserError(config.fault("output_prefix", rule, "make room, or name a larger disk"))


def peak_bytes(expected: TokenEstimate) -> int:
    """Maximum disk space that the work takes at once, in bytes: ids once, but for what the merge is copying; index."""
    in_batches = min(merge.NUM_THREADS * merge.CHECKPOINT_BYTES, expected.output_bytes // 2)
    return expected.output_bytes + in_batches + DOCUMENT_BYTES * expected.documents
