"""Small Hugging Face models and tokenizers, and documents for them, in a script with spaces and in one without."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def spaced() -> list[str]:
    """Documents of words between spaces, short ones more frequent, as in languages."""
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefghij", k=2 + number // 25)) for number in range(150)]
    return written(lambda: " ".join(chance.choices(words, [1 / (5 + n) for n in range(150)], k=10)) + ".", 70)


def unspaced() -> list[str]:
    """Documents in the manner of Japanese: runs of kanji and of hiragana, no space, one ending often after one stem."""
    chance = random.Random(2)
    stems = ["".join(chance.choices("山川田本日月木人大小", k=1 + number // 30)) for number in range(60)]
    ends = ["を", "は", "が", "に", "から", "まで", "した", "する", "です", "だった"]

    def sentence() -> str:
        numbers = chance.choices(range(60), [1 / (5 + n) for n in range(60)], k=6)
        return (
            "".join(stems[n] + (ends[n % 10] if chance.random() < 0.7 else chance.choice(ends)) for n in numbers) + "。"
        )

    return written(sentence, 70)


def written(sentence: Callable[[], str], num_documents: int) -> list[str]:
    return [
        "\n".join("".join([sentence(), " " if "." in sentence() else "", sentence()]) for _ in range(8))
        for _ in range(num_documents)
    ]


def tokenizer_of(documents: Sequence[str]) -> PreTrainedTokenizerFast:
    """A BPE tokenizer of bytes, which in text without spaces has pieces across the borders of words."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        documents,
        trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>")


def causal_model(
    documents: Sequence[str], folder: Path | None = None
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A model with random weights that differ enough to have opinions, and its tokenizer; saved in `folder`."""
    tokenizer = tokenizer_of(documents)
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        initializer_range=0.3, max_position_embeddings=1024, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    if folder is not None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return model, tokenizer
