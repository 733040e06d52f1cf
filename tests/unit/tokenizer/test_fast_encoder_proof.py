"""What the proof of the fast encoder rests on: characters, short strings, normalisation, and what is left out of it."""

import json
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_models import LLAMA_3, QWEN_3, byte_level, documents
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from toy_tokenizers import TrainToy

from zerokara.tokenizer import fast_encoder
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.fast_encoder import PATTERNS, FastEncoder
from zerokara.tokenizer.hugging_face import BYTES, open_encoder

ASSIGNED = [chr(code) for code in range(1, 0x110000) if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")]
PRIVATE = [chr(code) for code in (*range(0xE000, 0xF900, 97), *range(0xF0000, 0x10FFFE, 9973))]
KINDS = "as'1. \n\r\té\u0301\u00a0\u017f中"
"""A character of each kind that a pattern knows: letters, also of contractions, digits, signs, spaces, ends, marks."""
END = "<|end|>"


def differing(encoder: Encoder, texts: Sequence[str]) -> list[str]:
    ours, theirs = encoder.encode_joined(texts), FastEncoder(encoder).encode_joined(texts)
    if np.array_equal(ours[0], theirs[0]) and ours[1] == theirs[1]:
        return []
    ends = [np.flatnonzero(ids == encoder.eos_id) for ids, _ in (ours, theirs)]
    parts = zip(texts, np.split(ours[0], ends[0]), np.split(theirs[0], ends[1]), strict=False)
    return [text for text, one, other in parts if not np.array_equal(one, other)]


def given(encoder: Encoder, texts: Sequence[str]) -> list[bool]:
    """Whether gigatoken encodes each text."""
    return [FastEncoder(encoder)._is_given(text) for text in texts]


def saved(
    folder: Path,
    pattern: str,
    vocabulary: Iterable[str],
    merges: list[tuple[str, str]],
    normalizer: Any = None,
    **model: Any,
) -> Encoder:
    ids = {piece: i for i, piece in enumerate(dict.fromkeys([*BYTES, *vocabulary]))}
    made = Tokenizer(models.BPE(vocab=ids, merges=merges, **model))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    made.pre_tokenizer = pre_tokenizers.Sequence([*split, bytes_]) if split else bytes_
    made.normalizer = normalizer
    made.add_special_tokens([END])
    made.save(str(folder / "tokenizer.json"))
    return open_encoder(folder / "tokenizer.json", END)


@pytest.mark.parametrize("pattern", PATTERNS, ids=["GPT-2", "Llama 3", "Qwen"])
def test_every_character_is_of_one_kind_in_both(tmp_path: Path, pattern: str) -> None:
    """Every byte is merged with each neighbour if no border is between them."""
    pairs = [pair for near in "a1.Ġ'Ċ" for byte in BYTES for pair in ((near, byte), (byte, near))]
    encoder = saved(tmp_path, pattern, map("".join, pairs), list(dict.fromkeys(pairs)))
    characters = ASSIGNED if pattern == PATTERNS[-1] else ASSIGNED[:20000:3]
    texts = [f"a{c}1{c} {c}.'{c}\n{c}a" for c in [*characters, *PRIVATE]]
    joined = ["".join(texts[start : start + 500]) for start in range(0, len(texts), 500)]
    assert fast_encoder.choose(encoder, joined[:1]).name.startswith("gigatoken")
    assert not differing(encoder, joined)


@pytest.mark.parametrize("pattern", PATTERNS, ids=["GPT-2", "Llama 3", "Qwen"])
def test_every_short_string_of_kinds_is_cut_alike(tmp_path: Path, pattern: str) -> None:
    """Each is a piece that is taken as a whole (`ignore_merges`), so that other borders are other ids."""
    texts = ["".join(each) for length in (1, 2, 3) for each in product(KINDS, repeat=length)]
    texts += [f"{text}{more}" for text in texts[-(len(KINDS) ** 3) :: 7] for more in ("s'", "\n 1", "  a", "'ll\u00a0")]
    spelt = {byte: character for character, byte in BYTES.items()}
    words = ["".join(spelt[byte] for byte in text[i:].encode()) for text in texts for i in range(len(text))]
    pieces = {word[:i] for word in words for i in range(1, len(word) + 1)}
    encoder = saved(tmp_path, pattern, sorted(pieces), [], ignore_merges=True)
    assert not differing(encoder, texts)


@pytest.mark.parametrize("form", ["NFC", "Sequence"])
def test_only_text_that_is_in_nfc_is_given_to_it(tmp_path: Path, form: str) -> None:
    normalizer = normalizers.NFC() if form == "NFC" else normalizers.Sequence([normalizers.NFC()])
    pairs = [(first, second) for first in BYTES for second in "aÌģ¤"]
    encoder = saved(tmp_path, PATTERNS[2], map("".join, pairs), pairs, normalizer)
    if form == "Sequence":
        assert fast_encoder.choose(encoder, ["a"]).encoder is encoder
        return
    marks = [c for c in ASSIGNED if unicodedata.combining(c) or unicodedata.decomposition(c)]
    texts = [
        f"{before}{mark}{after}"
        for mark in marks[::3]
        for before, after in (("e", "\u0301"), ("\u0301", ""), ("क", "\u093c"))
    ]
    texts += ["\u07d2\u07fd\u07eb", "\u07d2\u07eb\u07fd", "\u0c36\u0c3c\u0c4d\u0c30", "e\u0301", "é", "क़"]
    assert not differing(encoder, texts)
    assert given(encoder, texts[-6:]) == [True, False, True, False, True, True]
    assert not any(given(encoder, ["\ua7ce's", "\U000323b0", "\x00"])), "newer than Unicode 16, or no text"


def test_a_text_with_an_added_token_is_not_given_to_it(tmp_path: Path) -> None:
    byte_level(tmp_path, QWEN_3, tokenizer_config={"eos_token": "<|endoftext|>"})
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    form = {"single_word": False, "lstrip": True, "rstrip": False, "normalized": True, "special": False}
    for i, text in enumerate(("\u00c9", "o\u0301", "word")):
        content["added_tokens"].append(form | {"id": 900 + i, "content": text, "single_word": text == "word"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    encoder = open_encoder(tmp_path)
    texts = [
        f"a {text} b" for text in ("\u00c9", "E\u0301", "\u00f3", "o\u0301", "sword words", "x <think>", "e\u0301")
    ]
    texts += [*documents(20), *texts]
    assert fast_encoder.choose(encoder, documents(20)).name.startswith("gigatoken")
    assert (
        not differing(encoder, texts)
        and not any(given(encoder, texts[:7]))
        and given(encoder, ["\u00e9 <|im_end|>"])[0]
    )


CHANGES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda json: json["pre_tokenizer"]["pretokenizers"][-1].update(add_prefix_space=True), "pre-tokenizer"),
    (lambda json: json["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "UnicodeScripts"}), "pre-tokenizer"),
    (lambda json: json.update(normalizer={"type": "NFKC"}), "normalizer"),
    (lambda json: json["model"].update(byte_fallback=True), "unusual pieces"),
    (lambda json: json["model"]["vocab"].update({"日": 999}), "unusual pieces"),
    (lambda json: json["model"]["merges"].append(json["model"]["merges"][0]), "a pair twice"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES)
def test_what_is_not_proved_is_left_to_tokenizers(tmp_path: Path, change: Callable[[Any], Any], reason: str) -> None:
    path = byte_level(tmp_path, LLAMA_3, tokenizer_config={"eos_token": "<|end_of_text|>"})
    assert fast_encoder.choose(open_encoder(tmp_path), documents(9)).name.startswith("gigatoken")
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    encoder = open_encoder(tmp_path)
    choice = fast_encoder.choose(encoder, documents(9))
    assert choice.encoder is encoder and reason in choice.reason


def test_of_a_sentencepiece_model_no_character_and_no_repetition_differs(train_toy: TrainToy) -> None:
    encoder = Encoder(train_toy(model_type="bpe", extra_ids=3))
    texts = [f"the{c}fox {c}" for c in (*ASSIGNED[::9], *PRIVATE)]
    texts += ["".join(each) for each in product(("the", "e", "fo", "x ", "  ", "の", "2"), repeat=5)]
    assert fast_encoder.choose(encoder, texts[:9]).name.startswith("gigatoken")
    assert not differing(encoder, ["\n".join(texts[start : start + 99]) for start in range(0, len(texts), 99)])
