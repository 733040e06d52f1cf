"""Stock AutoTokenizer against SentencePiece: the same ids for hard and random texts; broken twins fail."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_models
import pytest
from foreign_models import GEMMA, LLAMA, T5
from toy_tokenizers import toy_lines, trainer

from zerokara.config.model import ARCHITECTURES
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.huggingface import tokenizer_json, tokenizer_proof
from zerokara.huggingface.families import FAMILIES, SpecialIds, hf_config
from zerokara.model.shapes import ModelShape
from zerokara.tokenizer.compatibility import HARD_TEXTS
from zerokara.tokenizer.encoder import Encoder


def _runs(count: int, seed: int) -> list[str]:
    """Lines of repeated characters, where equal scores and overlapping merges are at home."""
    rng = random.Random(seed)
    parts = ["a", "へ", "-", "=", " ", "ー", "。", "e", "th", "の", "오", "42", "\t", "---"]
    return ["".join(rng.choice(parts) * rng.randint(1, 30) for _ in range(rng.randint(1, 5))) for _ in range(count)]


def _documents() -> list[str]:
    lines = toy_lines(200, 7) + _runs(200, 8)
    return ["\n".join(lines[i : i + 5]) for i in range(0, len(lines), 5)]


Train = Callable[..., Encoder]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    make = trainer(tmp_path_factory, toy_lines(800) + _runs(200, 2))
    return lambda **settings: Encoder(make(vocab_size=650, **settings))


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "dummy prefix": {"add_dummy_prefix": True},
    "user symbols, no bytes": {"user_defined_symbols": ("<sep>", "fox"), "byte_fallback": False},
    "sentinels": {"extra_ids": 5},
    "whole numbers": {"split_digits": False},
    "nfkc": {"normalization_rule_name": "nfkc"},
    "nmt_nfkc": {"normalization_rule_name": "nmt_nfkc"},
}


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
@pytest.mark.parametrize("name", SETTINGS)
def test_ids_are_equal_for_hard_texts_and_documents(train: Train, tmp_path: Path, model_type: str, name: str) -> None:
    encoder = train(model_type=model_type, **SETTINGS[name])
    tokenizer_json.write(encoder, tmp_path, 64)
    result = tokenizer_proof.prove(encoder, tokenizer_proof.load(tmp_path), _documents(), 10_000)
    assert not result.faults, result.faults
    assert result.facts["hard_texts"] >= len(HARD_TEXTS) + 5
    counts = [result.facts[key] for key in ("lines", "whole_texts", "equal", "ties")]
    assert counts == [400, 80, 400, 0], "scores that sum without rounding leave no ties"


@pytest.mark.parametrize("name", FAMILIES)
def test_each_familys_configuration_opens_the_tokenizer_that_is_written(
    train: Train, tmp_path: Path, name: str
) -> None:
    """AutoTokenizer reads config.json, too: for some families it takes a class of its own, whatever the files say."""
    encoder, traits = train(extra_ids=5), ARCHITECTURES[name]
    shape = ModelShape.from_config(PretrainConfig(architecture=name, hidden_size=64), encoder.vocab_size)
    hf_config(shape, SpecialIds(None, encoder.eos_id, encoder.pad_id), "fp32").save_pretrained(tmp_path)
    tokenizer_json.write(encoder, tmp_path, 64, traits.is_encoder_decoder)
    opened = tokenizer_proof.load(tmp_path)
    assert bool(tokenizer_proof.prove(encoder, opened, _documents()).faults) == bool(traits.tokenizer_class)
    assert type(opened).__name__ == (traits.tokenizer_class or "TokenizersBackend")


FOREIGN: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "t5": T5,
    "gemma": GEMMA,
    "llama that drops repeated spaces": {**LLAMA, "remove_extra_whitespaces": True},
    "t5 without prefix": {**T5, "add_dummy_prefix": False},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_ids_of_tokenizers_of_others_are_equal(tmp_path: Path, kind: str) -> None:
    encoder = Encoder(foreign_models.train(tmp_path / "tokenizer.model", FOREIGN[kind]))
    tokenizer_json.write(encoder, tmp_path, 64)
    theirs = tokenizer_proof.load(tmp_path)
    result = tokenizer_proof.prove(encoder, theirs, foreign_models.documents(60, seed=8), 200)
    assert not result.faults and result.facts["lines"] == 200 and result.facts["equal"] >= 199, result.faults
    assert (theirs.pad_token, theirs.eos_token) == ("<unk>" if "llama" in kind else "<pad>", "</s>")


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5"])
def test_the_folder_loads_beside_a_model_of_any_family(train: Train, tmp_path: Path, architecture: str) -> None:
    encoder = train(extra_ids=2)
    tokenizer_json.write(encoder, tmp_path, 128)
    config = {"model_type": architecture, "vocab_size": 650, "bos_token_id": 1, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    theirs = tokenizer_proof.load(tmp_path)
    ids = (theirs.unk_token_id, theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    assert ids == (encoder.unk_id, encoder.bos_id, encoder.eos_id, encoder.pad_id)
    assert len(theirs) == encoder.vocab_size and theirs.model_max_length == 128
    assert not theirs.clean_up_tokenization_spaces
    text = "the fox\n今日は </s> 42"
    assert theirs(text, split_special_tokens=True)["input_ids"] == encoder.encode(text).tolist(), "no <s>, no </s>"
    assert encoder.eos_id in theirs(text)["input_ids"], "by default the name of a control token is the token"
    assert theirs("a<extra_id_0>")["input_ids"][-1] == encoder.vocab_size - 1
    assert theirs.decode([*encoder.encode("the fox"), 2], skip_special_tokens=True) == "the fox"
    padded = theirs(["the fox", "the"], padding=True)["input_ids"]
    assert padded[1][0] == encoder.pad_id, "what a decoder goes on from stands last"


def _break(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def test_sentinels_are_proved_as_their_users_write_them(train: Train, tmp_path: Path) -> None:
    """T5's: one id, without a lonely space before it; and an end behind every text where an encoder reads."""
    encoder = train(extra_ids=5, add_dummy_prefix=False)
    tokenizer_json.write(encoder, tmp_path, 64, is_encoder_decoder=True)
    assert not tokenizer_proof.prove(encoder, tokenizer_proof.load(tmp_path), ["the fox"]).faults
    theirs = tokenizer_proof.load(tmp_path)
    expected = [*encoder.encode("the").tolist(), encoder.vocab_size - 1, *encoder.encode(" fox").tolist(), 2]
    assert theirs("the <extra_id_0> fox")["input_ids"] == expected
    assert theirs(["a", "the fox"], padding=True)["attention_mask"][0][:2] == [1, 1]

    def keep_spaces(content: dict[str, Any]) -> None:
        for token in content["added_tokens"]:
            token["lstrip"] = False

    _break(tmp_path, keep_spaces)
    broken = tokenizer_proof.prove(encoder, tokenizer_proof.load(tmp_path), ["the fox"])
    assert broken.facts["failures"] == 5 and "a <extra_id_" in broken.faults[0]


def _swap_pieces(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        vocabulary["の"], vocabulary["。"] = vocabulary["。"], vocabulary["の"]
    else:
        names = [piece for piece, _ in vocabulary]
        a, b = names.index("の"), names.index("。")
        vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]


def _no_line_end(content: dict[str, Any]) -> None:
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "\n"]
    content["normalizer"]["normalizers"].insert(0, {"type": "Replace", "pattern": {"String": "\n"}, "content": " "})


def _without(step: str) -> Callable[[dict[str, Any]], None]:
    """Take the steps of a kind out of the normalizer and the decoder."""

    def change(content: dict[str, Any]) -> None:
        for steps in (content["normalizer"]["normalizers"], content["decoder"]["decoders"]):
            steps[:] = [each for each in steps if each["type"] != step and step not in each.get("pattern", {})]

    return change


def _prefix_on_each_line(content: dict[str, Any]) -> None:
    content["normalizer"]["normalizers"] += [{"type": "Replace", "pattern": {"Regex": r"\n(?=.)"}, "content": "\n▁"}]


def _names_in_one(content: dict[str, Any]) -> None:
    assert content.pop("pre_tokenizer")["type"] == "Split"


def _control_pieces_that_can_win(content: dict[str, Any]) -> None:
    for entry in content["model"]["vocab"][:4]:
        entry[1] = 0.0


MARKING = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
STRIPPING = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
OURS: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (_swap_pieces, "ids"),
    # The trap: pre-tokeniser Metaspace together with the line end as an added token.
    (lambda content: content.update(pre_tokenizer=MARKING), "ids"),
    (_no_line_end, "ids"),
    (lambda content: content["model"].update(byte_fallback=False), "ids"),
    (lambda content: content["decoder"]["decoders"].append(STRIPPING), "decoded text"),
]
TWINS: dict[str, list[tuple[Callable[[dict[str, Any]], None], str]]] = {
    "unigram": [*OURS, (_control_pieces_that_can_win, "ids of '<unk>'")],
    "bpe": OURS,
    "llama": [(_without("Prepend"), "ids"), (_prefix_on_each_line, "ids"), (_without("Strip"), "decoded text")],
    "t5": [(_without("Regex"), "ids"), (_names_in_one, "ids")],
}
"""Changes of a tokenizer.json, and how the first difference begins."""


@pytest.mark.parametrize("kind", TWINS)
def test_broken_twins_fail(train: Train, tmp_path: Path, kind: str) -> None:
    if kind in FOREIGN:
        encoder = Encoder(foreign_models.train(tmp_path / "tokenizer.model", FOREIGN[kind]))
    else:
        encoder = train(model_type=kind)
    texts = [*_documents(), *foreign_models.documents(60, seed=8)]
    for change, beginning in TWINS[kind]:
        tokenizer_json.write(encoder, tmp_path, 64)
        _break(tmp_path, change)
        result = tokenizer_proof.prove(encoder, tokenizer_proof.load(tmp_path), texts, 100)
        assert result.examples[0].startswith(beginning), result.examples
        assert result.facts["failures"] > 0 and result.examples[0] in result.faults[0]


class _Tied:
    """A tokenizer that takes other, equal ways for some texts."""

    def __init__(self, encoder: Encoder, ways: dict[str, list[int]]) -> None:
        self.encoder, self.ways = encoder, ways

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.ways.get(text, self.encoder.encode(text).tolist()) for text in texts]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return self.encoder.decode(ids)


def test_a_tie_is_the_same_text_of_the_same_score_and_few_pass(tmp_path: Path) -> None:
    """Of a model with exact ties: pieces へ and へへへ of scores that float32 cannot hold."""
    settings = {**GEMMA, "model_type": "unigram", "user_defined_symbols": ["\n"]}
    texts = [*toy_lines(800), *["へ", "への", "へへへ"] * 100]
    encoder = Encoder(foreign_models.train(tmp_path / "tokenizer.model", settings, texts, 600))
    number = {piece.text: i for i, piece in enumerate(encoder.model.pieces)}
    short, long, tied = number["へ"], number["へへへ"], "へへへへ"
    lines = [f"{i} の" for i in range(2000)]

    def result_of(theirs: list[int], count: int) -> tokenizer_proof.Proof:
        return tokenizer_proof.prove(encoder, _Tied(encoder, {tied: theirs}), [tied] * count + lines, 10_000)

    ours = encoder.encode(tied).tolist()
    assert ours in ([short, long], [long, short])
    few, many, worse = result_of(ours[::-1], 2), result_of(ours[::-1], 3), result_of([short] * 4, 1)
    assert not few.faults and (few.facts["ties"], few.facts["equal"]) == (2, 2000)
    assert str(ours[::-1])[1:-1] in few.examples[0]
    assert many.facts["failures"] == 0 and "3 ties" in many.faults[0] and "0.1%: tie of 'へへへへ'" in many.faults[0]
    assert "ids of 'へへへへ' at token" in worse.faults[0]
