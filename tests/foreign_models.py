"""Tokenizers as the best-known models have them, small: trained with the settings of the originals in the process.

No original is needed: what is special about them (first pieces, prefix, normalisation, byte pieces, line ends) follows
from the trainer's settings, which their files record.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece

WORDS = ("the", "fox", "naïve", "Größe", "țară", "42", "日本語", "の", "=", "--", "(x)", "aaa")


def documents(count: int, seed: int = 4) -> list[str]:
    """Texts of several lines, with white space that a tokenizer may drop, and no "<" or ">"."""
    chance = random.Random(seed)
    words = [*WORDS, *("".join(chance.choices("etaoinshrdlu", k=chance.randint(2, 7))) for _ in range(120))]

    def line() -> str:
        spaces = chance.choices([" ", "  ", "\t"], [20, 1, 1])[0]
        indent = chance.choices(["", "  ", " "], [8, 1, 1])[0]
        return indent + spaces.join(chance.choices(words, k=chance.randint(1, 12))) + chance.choice(["", ".", " "])

    return ["\n".join(line() for _ in range(chance.randint(1, 9))) for _ in range(count)]


STEP_1 = {
    "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "add_dummy_prefix": False,
    "remove_extra_whitespaces": False, "user_defined_symbols": ["\n"], "pad_id": 3,
}  # fmt: skip
_BPE = {
    "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True, "split_digits": True,
}  # fmt: skip
LLAMA = {**_BPE, "add_dummy_prefix": True, "unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}
"""Llama 2's, Mistral 7B's: no `<pad>`, line ends are the byte piece <0x0A>."""
T5 = {
    "model_type": "unigram", "byte_fallback": False, "normalization_rule_name": "nmt_nfkc", "add_dummy_prefix": True,
    "remove_extra_whitespaces": True, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1,
}  # fmt: skip
"""T5's: line ends become spaces; the sentinels do not stand in the file."""
GEMMA = {
    **_BPE, "add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3,
    "user_defined_symbols": ["<mask>", "\n", "\n\n", "\n\n\n", "▁▁", "<table>"],
}  # fmt: skip
"""Gemma's: several line ends are one piece."""


def train(path: Path, settings: dict[str, Any], texts: Sequence[str] = (), vocab_size: int = 420) -> Path:
    """Train a tokenizer and write it to `path`."""

    lines = (line for text in texts or documents(150) for line in text.split("\n"))
    with open(path, "wb") as file:  # with `model_prefix` the folder would stand in the model
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines, model_writer=file, vocab_size=vocab_size, hard_vocab_limit=False,
            character_coverage=1.0, num_threads=1, minloglevel=2, **settings,
        )  # fmt: skip
    return path
