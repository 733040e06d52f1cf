"""The fast encoder: chosen where it is proved equal, left when it differs."""

import pickle
import sys
from pathlib import Path
from typing import Any

import foreign_models
import numpy as np
import pytest
from foreign_models import GEMMA, LLAMA
from toy_tokenizers import TrainToy, toy_lines

from zerokara.tokenizer import fast_encoder
from zerokara.tokenizer.compatibility import hard_texts
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.model_file import ModelFile

TEXTS = ["\n".join(toy_lines(40, seed)) for seed in range(20)]


FOREIGN = {"llama": LLAMA, "gemma": {**GEMMA, "user_defined_symbols": ["\n", "\n\n"]}}


@pytest.mark.parametrize("kind", ["step 1", *FOREIGN])
def test_bpe_is_done_by_gigatoken_with_the_same_ids(train_toy: TrainToy, tmp_path: Path, kind: str) -> None:
    symbols = ["[CALL]", "<|im|>"]
    if kind == "step 1":
        encoder = Encoder(train_toy(model_type="bpe", extra_ids=2, user_defined_symbols=symbols, vocab_size=560))
    else:
        encoder = Encoder(foreign_models.train(tmp_path / "tokenizer.model", FOREIGN[kind]))
    hard = hard_texts(encoder)
    needed = ("</s>", "<extra_id_1>", "[CALL][CALL]", "a<|im|>b", "[CALL CALL]", "[CALL]<|im|>")
    assert kind != "step 1" or all(any(each in text for text in hard) for each in needed)
    choice = fast_encoder.choose(encoder, TEXTS)
    assert choice.name == "gigatoken 0.10.0" and "proved" in choice.reason, choice.reason
    quick = pickle.loads(pickle.dumps(choice.encoder))
    assert (quick.vocab_size, quick.eos_id) == (encoder.vocab_size, encoder.eos_id)
    texts = [*TEXTS, *hard, *foreign_models.documents(60, seed=12), "x" * 5000 + "</s>" + "\n" * 300, "\n a\n\n\nb \n"]
    (ours, our_bytes), (theirs, their_bytes) = encoder.encode_joined(texts), quick.encode_joined(texts)
    assert theirs.dtype == np.int32 and np.array_equal(ours, theirs)
    assert our_bytes == their_bytes == [len(text.encode()) for text in texts]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "unigram"),
        ({"model_type": "bpe", "add_dummy_prefix": True}, "every line"),
        ({"model_type": "bpe", "byte_fallback": False}, "byte fallback"),
        ({"model_type": "bpe", "normalization_rule_name": "nfkc"}, "changes its text"),
    ],
)
def test_sentencepiece_does_what_was_not_tried(train_toy: TrainToy, settings: dict[str, Any], reason: str) -> None:
    choice = fast_encoder.choose(Encoder(train_toy(**settings)), TEXTS)
    assert choice.name == "sentencepiece 0.2.3" and reason in choice.reason and isinstance(choice.encoder, Encoder)


def _other_merges(encoder: Encoder, folder: Path) -> Path:
    """The same model with the ranks of its last two merges exchanged."""
    model = ModelFile(encoder.model_bytes)
    learnt = [piece for piece in model._proto.pieces if piece.type == 1 and len(piece.piece) == 2]
    learnt[0].score, learnt[-1].score = learnt[-1].score, learnt[0].score
    path = folder / "other.model"
    path.write_bytes(model.to_bytes())
    return path


def test_other_ids_are_found_before_the_work(toy_bpe: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(fast_encoder.FastEncoder):
        def __init__(self, reference: Encoder) -> None:
            super().__init__(Encoder(_other_merges(reference, tmp_path)))

    monkeypatch.setattr(fast_encoder, "FastEncoder", Wrong)
    choice = fast_encoder.choose(toy_bpe, TEXTS)
    assert choice.name.startswith("sentencepiece") and "different ids" in choice.reason
    assert isinstance(choice.encoder, Encoder)


@pytest.mark.parametrize(("module", "value"), [("gigatoken", None), ("gigatoken._load.sentencepiece", None)])
def test_without_gigatoken(toy_bpe: Encoder, monkeypatch: pytest.MonkeyPatch, module: str, value: None) -> None:
    monkeypatch.setitem(sys.modules, module, value)
    choice = fast_encoder.choose(toy_bpe, TEXTS)
    assert choice.name.startswith("sentencepiece") and "cannot be used" in choice.reason
