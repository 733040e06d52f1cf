"""The characters of the training text that get a piece each, counted as SentencePiece's trainer counts them.

In: the settings and a file of training sentences. Out: their number, from which the smallest vocabulary follows.
Source: sentencepiece 0.2.3, `TrainerInterface::LoadSentences`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import sentencepiece

from zerokara.config.tokenizer_config import NUM_BYTE_PIECES, TokenizerConfig
from zerokara.tokenizer.encoder import SPACE_MARK

_BOUNDARY = "\x1f"
"""The trainer's stand-in for a user symbol (sentencepiece 0.2.3; up to 0.2.1 the tab), which never gets a piece."""


def required_characters(config: TokenizerConfig) -> str:
    """The characters that always get a piece.

    These are the characters in the names of control and byte pieces: text may spell such a name, SentencePiece never
    takes it for the piece, but Hugging Face's Unigram would where the alternative has an unknown character. And white
    space that no text should lose, where no bytes can spell it.
    """
    names = ["<unk>", "<s>", "</s>", "<pad>", *(["<extra_id_0123456789>"] if config.extra_ids else [])]
    names += [f"<0x{byte:02X}>" for byte in range(NUM_BYTE_PIECES)] if config.byte_fallback else []
    names += [] if config.byte_fallback else ["\t\r" if not config.normalization_rule_name.startswith("nmt") else ""]
    return "".join(sorted(set("".join(names))))


def num_required_characters(config: TokenizerConfig, sentences: Path) -> int:
    """The number of characters that get a piece: the most frequent, until their share reaches `character_coverage`.

    As in SentencePiece, the share is a float32, and the boundary mark is counted but left out.
    """
    counts = np.zeros(0x110000, dtype=np.int64)
    for text in _normalized_blocks(config, sentences):
        content = np.frombuffer(text.encode(), dtype=np.uint8)
        counts[:128] += np.bincount(content, minlength=256)[:128]
        # Every byte of a character outside ASCII is above 127, so these characters can be taken out whole.
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
    # The required ones first, then by falling count and rising code point, as SentencePiece's `Sorted`.
    ordered = present[np.lexsort((present, -counts[present], ~required[present]))]
    before = np.cumsum(counts[ordered]) - counts[ordered]
    reached = (before / total).astype(np.float32) >= np.float32(config.character_coverage)
    num = int(np.argmax(reached)) if reached.any() else len(ordered)
    return num - int(ord(_BOUNDARY) in ordered[:num])


def _normalized_blocks(config: TokenizerConfig, sentences: Path) -> Iterator[str]:
    """The sentences as the trainer sees them, some thousand at a time, with a boundary mark for each user symbol."""
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
