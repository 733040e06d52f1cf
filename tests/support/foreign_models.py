"""Tokenizers as the best-known models have them, small: trained with the settings of the originals in the process.

No original is needed: what is special about them (first pieces, prefix, normalisation, byte pieces, line ends) follows
from the trainer's settings, which their files record.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

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


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_3, QWEN_3 = "llama3", "qwen3"
SPECIAL = {
    LLAMA_3: ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    QWEN_3: ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
}


def byte_level(folder: Path, kind: str, texts: Sequence[str] = (), vocab_size: int = 420, **files: Any) -> Path:
    """Make a folder with a byte-level BPE as Llama 3 or Qwen 3 has it, and JSON `files` beside tokenizer.json."""
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=kind == LLAMA_3))
    split = pre_tokenizers.Split(tokenizers.Regex(_WORDS % ("{1,3}" if kind == LLAMA_3 else "")), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence([split, bytes_]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts or documents(150), trainer)
    made.add_special_tokens(SPECIAL[kind])
    if kind == QWEN_3:
        made.normalizer = normalizers.NFC()
        made.add_tokens(["<think>", "</think>"])
    else:
        begin = SPECIAL[kind][0]
        made.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, made.token_to_id(begin))]
        )
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder / "tokenizer.json"
