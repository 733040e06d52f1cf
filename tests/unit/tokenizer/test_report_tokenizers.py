"""Tokenizers of other makers, measured as ours are: against counts by hand and against SentencePiece itself."""

from pathlib import Path

import pytest
import tokenizers
from configs import fault_of
from huggingface_hub import constants
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from toy_tokenizers import TrainToy

from zerokara.errors import Fault
from zerokara.huggingface import tokenizer_json
from zerokara.tokenizer import report_measures as measuring
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.report_tokenizers import TokenKind, find_file, open_tokenizer

LINES = ["the quick fox", "今日はよい天気です。", "rare 龘 靐", "", " The  dogs<|end|> [UNK]", "None", "오늘 42"]
TRAINED_ON = ["None of the fox and the dogs", "今日は公園でとてもよい天気", "오늘 날씨가 좋아서"] * 20


def byte_level(folder: Path) -> Path:
    """A BPE over bytes as GPT-2's, with a special token and a post-processor that narrows offsets."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TRAINED_ON,
        trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False),
    )
    made.enable_truncation(5)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def word_piece(folder: Path) -> Path:
    """A WordPiece as BERT's, which folds case and has an unknown token."""
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(
        TRAINED_ON, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    )
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    path = folder / "word_piece.json"
    made.save(str(path))
    return path


def test_a_bpe_over_bytes_equals_a_count_by_hand(tmp_path: Path) -> None:
    path = byte_level(tmp_path)
    measures = measuring.measure(open_tokenizer(tmp_path), ["\n".join(LINES)])[0]
    vendor = tokenizers.Tokenizer.from_file(str(path))
    vendor.no_truncation()
    vendor.encode_special_tokens = True
    ids = [i for line in LINES for i in vendor.encode(line, add_special_tokens=False).ids]
    alone = [vendor.decode([i], skip_special_tokens=False) for i in ids]
    assert measures.tokens == len(ids) + len(LINES) - 1
    assert measures.bytes == len("\n".join(LINES).encode())
    assert measures.byte_tokens == sum("\ufffd" in text for text in alone) > 5
    assert measures.character_tokens == sum(len(text) == 1 for text in alone if "\ufffd" not in text) > 0
    assert measures.unknown_tokens == measures.unknown_characters == 0, "there is a piece None, and no unknown token"
    assert vendor.get_vocab()["None"] in ids
    assert measures.round_trip_failures == 0, "also of the text that spells a special token"
    assert open_tokenizer(path).description == "Hugging Face BPE, byte-level"


def test_a_word_piece_equals_a_count_by_hand(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(word_piece(tmp_path))
    measures = measuring.measure(tokenizer, ["The 龘靐 fox", "the fox"])[0]
    assert (measures.unknown_tokens, measures.unknown_characters) == (1, 2), "one token hides a word"
    assert tokenizer.description == "Hugging Face WordPiece"
    assert measures.tokens == 5 and measures.round_trip_failures == 1
    assert measures.failure_examples == ["The 龘靐 fox"]
    assert tokenizer.kinds[tokenizer.pieces.index("##o")] == TokenKind.CHARACTER
    cells = [(cell.text, cell.kind) for cell in measuring.cells(tokenizer, "The 龘靐 fox")]
    space = (" ", "dropped")
    assert cells == [("The", "piece"), space, ("龘靐", "unknown"), space, ("fox", "piece")]


@pytest.mark.parametrize("settings", [{}, {"model_type": "bpe"}, {"byte_fallback": False}, {"add_dummy_prefix": True}])
def test_ours_measures_alike_in_both_formats(train_toy: TrainToy, tmp_path: Path, settings: dict[str, object]) -> None:
    model_path = train_toy(**settings)
    tokenizer_json.write(Encoder(model_path), tmp_path, 100)
    texts = ["\n".join(LINES), "no 龘 newline"]
    ours, theirs = (
        measuring.measure(open_tokenizer(path), texts)[0] for path in (model_path, tmp_path / "tokenizer.json")
    )
    assert ours == theirs and ours.byte_tokens + ours.unknown_tokens > 0
    moved = measuring.measure(
        open_tokenizer(tmp_path / "tokenizer.json"), [texts[0].replace("quick", "quack"), texts[1]]
    )[0]
    assert moved != ours


def test_cells_of_every_kind_join_to_the_line(tmp_path: Path, toy: Encoder) -> None:
    (tmp_path / "ours").mkdir()
    tokenizer_json.write(toy, tmp_path / "ours", 100)
    for path in (byte_level(tmp_path), word_piece(tmp_path), tmp_path / "ours" / "tokenizer.json", toy.model_path):
        tokenizer = open_tokenizer(path)
        for line in [*LINES, "龘靐 fox  龘", "  spaces  "]:
            cells = measuring.cells(tokenizer, line)
            assert "".join(cell.text for cell in cells) == line
            (ids,) = tokenizer.encode([line])
            assert [piece for cell in cells for piece in cell.pieces] == [tokenizer.pieces[i] for i in ids]
    spaced = measuring.cells(open_tokenizer(byte_level(tmp_path)), "the fox")
    assert not [cell for cell in spaced if cell.kind == "dropped"], "the space belongs to the piece"
    rare = measuring.Cell("龘", ["<0xE9>", "<0xBE>", "<0x98>"], "byte")
    assert rare in measuring.cells(open_tokenizer(toy.model_path), "rare 龘")


def _fault(path: str | Path) -> Fault:
    fault = fault_of(open_tokenizer, path)
    assert fault.where == str(path)
    return fault


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.model").write_bytes(b"")
    assert "SentencePiece" in _fault(tmp_path / "empty.model").rule
    assert "no such" in _fault(tmp_path / "other.model").rule
    folder = _fault(tmp_path)
    assert "tokenizer.json" in folder.rule and "tokenizer.model" in folder.rule and folder.remedy
    for content in (b"nope", b"[]", b"{}", b'{"model": 1}', b"\xff"):
        (tmp_path / "vocab.json").write_bytes(content)
        assert "tokenizer.json" in _fault(tmp_path / "vocab.json").rule
    assert "no such" in _fault(tmp_path / "missing.json").rule
    path = word_piece(tmp_path)
    path.write_text(path.read_text("utf-8").replace('"unk_token": "[UNK]"', '"unk_token": "<nowhere>"'), "utf-8")
    assert "Missing [UNK]" in _fault(path).rule, "it could not encode"


def test_a_model_of_the_hub_is_compared(toy: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert "hf download owner/name" in _fault("hf://owner/name").remedy
    assert "hf download" in _fault("hf://no/such/name").remedy
    references, snapshot = (tmp_path / "models--owner--name" / name for name in ("refs", "snapshots/0123"))
    for folder in (references, snapshot):
        folder.mkdir(parents=True)
    (references / "main").write_text("0123", encoding="utf-8")
    (snapshot / "spiece.model").write_bytes(toy.model_bytes)
    assert find_file("hf://owner/name") == snapshot / "spiece.model"
    assert open_tokenizer("hf://owner/name").vocab_size == toy.vocab_size
