"""What step 2 finds out before the work: the tokenizer, the encoder to use, and how many tokens to expect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from zerokara.config.data_settings import DataSettings
from zerokara.corpus.inputs import InputFile
from zerokara.corpus.sizes import total_plain_bytes
from zerokara.tokenizer.compatibility import check_exportable, notes
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.encoder_choice import EncoderChoice, choose
from zerokara.tokens.estimate import TokenEstimate, check_disk_space, estimate_tokens, sample_corpus


@dataclass(frozen=True)
class PreparedEncoding:
    """All that `encode_corpus` needs beside the configuration and the files."""

    encoder: Encoder
    """The tokenizer, which defines the ids."""
    choice: EncoderChoice
    """The encoder that gives these ids fastest."""
    expected: TokenEstimate
    notes: Sequence[str] = ()
    """What the user should know of a tokenizer that step 1 did not make."""


def prepare(config: DataSettings, files: Sequence[InputFile]) -> PreparedEncoding:
    """Open the tokenizer, choose and prove the encoder on a sample of the corpus, and estimate tokens and disk space.

    Raises:
        UserError: the file is no tokenizer to train with, no export could be proved with it, or the disk is too small.
    """
    encoder = Encoder(config.input_tokenizer_file)
    check_exportable(encoder)
    places = sample_corpus(config, files)
    rounds = zip_longest(*(place.texts for place in places))
    corpus_bytes = total_plain_bytes(files)
    choice = choose(encoder, (text for texts in rounds for text in texts if text is not None), corpus_bytes)
    expected = estimate_tokens(corpus_bytes, places, choice.encoder)
    check_disk_space(config, files, expected)
    return PreparedEncoding(encoder, choice, expected, notes(encoder))
