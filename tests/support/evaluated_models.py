"""Small models of others, to be measured: made with plain transformers, with tokenizers as the best-known ones have.

Weights are random and wide, so that losses differ from token to token; the tokenizers are trained in the process.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from foreign_models import documents
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CONTEXT = 32


def byte_level() -> Any:
    """GPT-2's kind: bytes, no unknown text, one token that both begins and ends."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(documents(100), trainer)
    end = "<|endoftext|>"
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=end)


def dummy_prefix() -> Any:
    """Llama 2's kind: a space before the text, byte pieces for what has no other, and bos before every text."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[*special, *pieces], limit_alphabet=60)
    tokenizer.train_from_iterator(documents(100), trainer)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def lossy() -> Any:
    """A tokenizer that knows no capitals: an easy way to little to predict."""
    made = byte_level()
    made.backend_tokenizer.normalizer = normalizers.Lowercase()
    return made


SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": CONTEXT},
    "llama": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": CONTEXT, "bos_token_id": 1,
    },
    "t5": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0},
}  # fmt: skip


def save(folder: Path, tokenizer: Any, kind: str = "gpt2") -> Path:
    """Write a model of about a hundred thousand parameters with `CONTEXT` tokens of context, and its tokenizer."""
    torch.manual_seed(0)
    size = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "initializer_range": 0.4}
    config = transformers.AutoConfig.for_model(kind, **size, **SIZES[kind])
    auto = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
