"""The report: its numbers against counts by hand, for every kind of tokenizer, and a page that no text can break."""

import re
from collections import Counter
from pathlib import Path
from xml.etree.ElementTree import Element, fromstring

import orjson
import pytest
import tokenizers
from configs import fault_of
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from toy_tokenizers import TrainToy, byte_ids

from zerokara.base.progress import Progress
from zerokara.huggingface import tokenizer_json
from zerokara.tokenizer import report
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.hugging_face import open_file, tokenizer_file
from zerokara.tokenizer.model_file import ModelFile
from zerokara.tokenizer.report import MeasuredTokenizer
from zerokara.tokenizer.sampling import SourceTexts

TEXTS = ["the quick fox\n今日はとてもよい天気です。", "rare 龘 and ▁ mark\n\n", "오늘 날씨가 좋아서 42"]
LINES = ["the quick fox", "今日はよい天気です。", "rare 龘 靐", "", " The  dogs<|end|> [UNK]", "None", "오늘 42"]
TRAINED_ON = ["None of the fox and the dogs", "今日は公園でとてもよい天気", "오늘 날씨가 좋아서"] * 20
NASTY = ["<script>", "<b>&", '"onload="x', "</style>", "-->"]


def opened(path: Path) -> MeasuredTokenizer:
    return MeasuredTokenizer(open_file(tokenizer_file(path)))


def measured(path: Path, texts: list[str]) -> report.Measures:
    return report.measure(opened(path), texts)


def byte_level(folder: Path) -> Path:
    """A BPE over bytes as GPT-2's, without a word about the end of a document, and a post-processor and truncation."""
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


def test_measures_of_ours_equal_a_count_by_hand(toy: Encoder) -> None:
    measures = measured(toy.model_path, TEXTS)
    ids = [i for text in TEXTS for i in toy.encode(text).tolist()]
    assert (measures.tokens, measures.lines) == (len(ids), 6)
    assert measures.characters == sum(map(len, TEXTS))
    assert measures.bytes == sum(len(text.encode()) for text in TEXTS)
    assert measures.byte_tokens == sum(i in byte_ids(toy) for i in ids) >= 3 and measures.unknown_tokens == 0
    assert (measures.round_trip_failures, measures.failure_examples) == (1, ["rare 龘 and ▁ mark"])
    assert measures.facts()["bytes_per_token"] == measures.bytes / len(ids)
    first, second, third = (measured(toy.model_path, [text]) for text in TEXTS)
    assert first + second + third == measures != first + second


def test_unknown_tokens_are_counted(train_toy: TrainToy) -> None:
    measures = measured(train_toy(byte_fallback=False), ["龘靐 the 龘", "fox"])
    assert measures.unknown_tokens == 2, "SentencePiece makes one token of a run"
    assert measures.round_trip_failures == 1


def test_a_bpe_over_bytes_equals_a_count_by_hand(tmp_path: Path) -> None:
    path = byte_level(tmp_path)
    measures = measured(tmp_path, ["\n".join(LINES)])
    vendor = tokenizers.Tokenizer.from_file(str(path))
    vendor.no_truncation()
    vendor.encode_special_tokens = True
    ids = [i for line in LINES for i in vendor.encode(line, add_special_tokens=False).ids]
    alone = [vendor.decode([i], skip_special_tokens=False) for i in ids]
    assert measures.tokens == len(ids) + len(LINES) - 1
    assert measures.byte_tokens == sum("\ufffd" in text for text in alone) > 5
    assert measures.unknown_tokens == 0, "there is a piece None, and no unknown token"
    assert vendor.get_vocab()["None"] in ids
    assert measures.round_trip_failures == 0, "also of the text that spells a special token"
    assert open_file(path).description == "Hugging Face BPE, byte-level"


def test_a_word_piece_equals_a_count_by_hand(tmp_path: Path) -> None:
    tokenizer = opened(word_piece(tmp_path))
    measures = report.measure(tokenizer, ["The 龘靐 fox", "the fox"])
    assert (measures.unknown_tokens, measures.tokens) == (1, 5) and tokenizer.encoder.description.endswith("WordPiece")
    assert measures.failure_examples == ["The 龘靐 fox"]
    cells = [(cell.text, cell.kind) for cell in report.cells(tokenizer, "The 龘靐 fox")]
    space = (" ", "dropped")
    assert cells == [("The", "piece"), space, ("龘靐", "unknown"), space, ("fox", "piece")]


@pytest.mark.parametrize("settings", [{}, {"model_type": "bpe"}, {"byte_fallback": False}, {"add_dummy_prefix": True}])
def test_ours_measures_alike_in_both_formats(train_toy: TrainToy, tmp_path: Path, settings: dict[str, object]) -> None:
    model_path = train_toy(**settings)
    tokenizer_json.write(Encoder(model_path), tmp_path, 100)
    texts, json_path = ["\n".join(LINES), "no 龘 newline"], tmp_path / "tokenizer.json"
    ours, theirs = (measured(path, texts) for path in (model_path, json_path))
    assert ours == theirs and ours.byte_tokens + ours.unknown_tokens > 0
    assert measured(json_path, [texts[0].replace("quick", "quack"), texts[1]]) != ours


def test_cells_of_every_kind_join_to_the_line(tmp_path: Path, toy: Encoder) -> None:
    for path in (byte_level(tmp_path), word_piece(tmp_path), toy.model_path):
        tokenizer = opened(path)
        for line in [*LINES, "龘靐 fox  龘", "  spaces  "]:
            cells = report.cells(tokenizer, line)
            assert "".join(cell.text for cell in cells) == line
            ids = tokenizer.encoder.encode(line)
            assert [piece for cell in cells for piece in cell.pieces] == [tokenizer.pieces[i] for i in ids]
    spaced = report.cells(opened(byte_level(tmp_path)), "the fox")
    assert not [cell for cell in spaced if cell.kind == "dropped"], "the space belongs to the piece"
    rare = report.Cell("龘", ["<0xE9>", "<0xBE>", "<0x98>"], "byte")
    assert rare in report.cells(opened(toy.model_path), "rare 龘")


def test_a_large_sample_is_counted_at_some_lines(toy: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("the fox\ndogs 42\n" * 10, encoding="utf-8")
    for limit, lines, size in ((10_000, ("the fox", "dogs 42"), 140), (100, ("the fox",), 70)):
        monkeypatch.setattr(report, "MAX_USAGE_BYTES", limit)
        used, num_bytes = report.count_sample(opened(toy.model_path), sentences, Progress("counting"))
        assert num_bytes == size and used.sum() == 10 * sum(len(toy.encode(line)) for line in lines)


def _make(toy: Encoder, tmp_path: Path, *compare_with: Path) -> report.Report:
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("the fox\nthe dogs\n", encoding="utf-8")
    sources = [SourceTexts(TEXTS, True), SourceTexts(["the fox"], False)]
    names = [str(path) for path in compare_with]
    return report.make(toy.model_path, ["a.jsonl", "b.jsonl"], sources, sentences, names)


def test_the_whole_report(toy: Encoder, toy_bpe: Encoder, tmp_path: Path) -> None:
    name = str(toy_bpe.model_path)
    made = _make(toy, tmp_path, toy_bpe.model_path)
    assert [source["measured_on"] for source in made.sources] == ["held-out text", "text offered to the training"]
    assert made.sources[0]["tokenizers"][name]["tokens"] == sum(len(toy_bpe.encode(text)) for text in TEXTS)
    assert made.all_sources["this one"]["tokens"] == sum(len(toy.encode(text)) for text in [*TEXTS, "the fox"])
    assert made.tokenizers == {
        "this one": {"description": "SentencePiece unigram, byte fallback", "vocab_size": toy.vocab_size},
        name: {"description": "SentencePiece BPE, byte fallback", "vocab_size": toy_bpe.vocab_size},
    }
    counts = Counter(toy.pieces[i] for line in ["the fox", "the dogs"] for i in toy.encode(line).tolist())
    assert dict(made.most_frequent) == dict(counts) and made.most_frequent[0][1] == max(counts.values())
    learnt = [piece.text for piece in ModelFile(toy.model_bytes).pieces if piece.type == 1]
    assert set(made.unused_pieces) == {piece for piece in learnt if not counts[piece]}
    assert made.num_learnt_pieces == len(learnt) and all(counts[piece] == count for piece, count in made.longest)
    assert [len(piece) for piece, _ in made.longest] == sorted(map(len, learnt), reverse=True)[:50]
    as_json, page = orjson.loads(orjson.dumps(made.as_json())), made.page()
    assert as_json["sources"][0]["tokenizers"]["this one"]["characters_per_token"] > 0
    assert as_json["num_unused_pieces"] == len(made.unused_pieces)
    for one in made.sources[0]["tokenizers"].values():
        assert f"{one['tokens']:,}" in page and f"{one['bytes_per_token']:.3f}" in page
    theirs, ours = (made.sources[0]["tokenizers"][each]["tokens"] for each in (name, "this one"))
    assert f"<td>{theirs / ours:.1%}</td>" in page
    assert len(made.rows()) == 4 and "rare·\u200b龘" in page


def test_nothing_to_measure_is_no_fault(toy: Encoder, tmp_path: Path) -> None:
    sentences = tmp_path / "sentences.txt"
    sentences.write_bytes(b"")
    for sources in ([], [SourceTexts(["", "\n\n"], True), SourceTexts([], True)]):
        made = report.make(toy.model_path, ["a.txt", "b.txt"][: len(sources)], sources, sentences)
        assert made.usage_bytes == 0 and made.most_frequent == []
        assert len(made.unused_pieces) == made.num_learnt_pieces > 0 and len(made.rows()) == len(sources)
        assert "not used" in made.page() and orjson.dumps(made.as_json())


def outline(page: str) -> Element:
    """Parse a page every element of which must be closed in turn, as if it were XML."""
    page = page.removeprefix("<!DOCTYPE html>\n").replace("<details open>", "<details>")
    return fromstring(re.sub(r"<((?:meta|br|col)\b[^>]*)>", r"<\1/>", page))


def test_the_page_needs_nothing_else_and_markup_in_pieces_is_text(train_toy: TrainToy, tmp_path: Path) -> None:
    model, sentences = train_toy(user_defined_symbols=tuple(NASTY)), tmp_path / "sentences.txt"
    line = f"the fox {' '.join(NASTY)} and \u3000 \t the dogs 今日は 龘 running far, away from a house they never knew"
    sentences.write_text(line + "\n", encoding="utf-8")
    sources = [SourceTexts([line, f"{line} ▁ <i>changed</i>"], True), SourceTexts([], False)]
    names = ["data/<i>one</i>.jsonl", 'two" onclick="x.jsonl']
    page = report.make(model, names, sources, sentences, [str(model)]).page()
    elements = list(outline(page).iter())
    assert {each.tag for each in elements}.isdisjoint({"script", "link", "img", "iframe", "b"})
    assert not [name for each in elements for name in each.attrib if name.startswith("on") or name in ("src", "href")]
    assert not re.search(r"https?:|url\(|@import", page) and '<meta charset="utf-8">' in page
    text = "".join(outline(page).find("body").itertext())  # type: ignore[union-attr]
    assert all(piece in text for piece in [*NASTY, *names, "<i>changed</i>"])
    bytes_ = r'<span class="p\d byte" title="&lt;0xE9&gt; &lt;0xBE&gt; &lt;0x98&gt;">龘<sup>&#x2060;3</sup></span>'
    assert re.search(bytes_, page)


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.model").write_bytes(b"")
    assert "empty" in fault_of(open_file, tmp_path / "empty.model").rule
    assert "no such" in fault_of(tokenizer_file, tmp_path / "other.model").rule
    path = tmp_path / "vocab.json"
    for content in (b"nope", b"[]", b"{}", b'{"model": 1}', b"\xff"):
        path.write_bytes(content)
        assert "tokenizer.json" in fault_of(open_file, path).rule and fault_of(open_file, path).where == str(path)
    path = word_piece(tmp_path)
    path.write_text(path.read_text("utf-8").replace('"unk_token": "[UNK]"', '"unk_token": "<nowhere>"'), "utf-8")
    assert "Missing [UNK]" in fault_of(open_file, path).rule, "it could not encode"


def test_what_nobody_sees_is_shown_and_does_not_tear_apart_what_it_joins() -> None:
    assert report._visible("ភាសា\u200bខ្មែរ") == "ភាសា¦\u200bខ្មែរ"
    assert report._visible("👨\u200d👩") == "👨\u200d👩" and "\u200c" in report._visible("می\u200cخواهم")
