"""Estimate of step 2: tokens and disk space by a sample, and a tokenizer that can be exported."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import foreign_models
import pytest
from configs import fault_of
from corpus_files import json_lines
from foreign_models import LLAMA, LLAMA_3
from made_tokens import encode

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.corpus.find import find_files
from zerokara.corpus.read import total_plain_bytes
from zerokara.steps.command import Options
from zerokara.steps.tokenize import tokenize
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.hugging_face import open_encoder
from zerokara.tokens import estimate
from zerokara.tokens.estimate import TokenEstimate, check_disk_space, estimate_tokens, sample_corpus
from zerokara.tokens.indexed import TokenPaths

MakeConfig = Callable[..., PretrainConfig]


@pytest.mark.parametrize("gzipped", [False, True])
def test_it_is_near(make_config: MakeConfig, corpus: Path, monkeypatch: pytest.MonkeyPatch, gzipped: bool) -> None:
    monkeypatch.setattr(estimate, "PLACE_CHARACTERS", 4_000)
    content = corpus.read_text(encoding="utf-8").replace("\n", "\n\n")
    corpus.write_text(content, encoding="utf-8")
    config = make_config(max_bad_fraction=1)
    encoder = Encoder(config.input_tokenizer_file)
    path, times = corpus, 1
    if gzipped:
        path, times = corpus.with_suffix(".jsonl.gz"), 8
        path.write_bytes(gzip.compress((content * times).encode()))
        assert total_plain_bytes(find_files([str(path)], "")) == pytest.approx(times * len(content.encode()), rel=0.05)
    files = find_files([str(path)], "")
    texts, sampled_bytes = sample_corpus(config, files)
    assert (sum(map(len, texts)) > 7 * 4_000) == (not gzipped), "from eight places, or the beginning of a packed file"
    expected = estimate_tokens(encoder, texts, total_plain_bytes(files) / sampled_bytes)
    (exact,) = encode(config).sources
    tokens = times * (exact.train.tokens + exact.valid.tokens)
    assert expected.tokens == pytest.approx(tokens, rel=0.15) and expected.output_bytes == 2 * expected.tokens
    if not gzipped:  # of which one place is read
        assert expected.documents == pytest.approx(exact.documents, rel=0.2)


def test_a_stretch_without_documents_is_not_read_to_its_end(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n" * 100_000, encoding="utf-8")
    files = find_files([str(tmp_path / "a.txt")], "")
    assert sample_corpus(make_config(), files) == ([], estimate.PLACE_BAD_LINES)
    _, expected, _ = estimate.prepare(make_config(), files, Encoder(make_config().input_tokenizer_file))
    assert expected.tokens == expected.documents == 0


def test_documents_of_txt_files_are_files(make_config: MakeConfig, tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "books").mkdir()
    for number in range(3):
        (tmp_path / "books" / f"{number}.txt").write_text("a line of a book\n" * 9000, encoding="utf-8")
    config = make_config(txt_document="file")
    encoder = Encoder(config.input_tokenizer_file)
    assert estimate.prepare(config, find_files([str(tmp_path / "books")], ""), encoder)[1].documents == 3
    _, mixed, _ = estimate.prepare(config, find_files([str(tmp_path / "books"), str(corpus)], ""), encoder)
    assert 100 < mixed.documents < 5000, "300 of the other source"


def test_a_disk_too_small(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config, expected = make_config(), TokenEstimate(0, output_bytes=5_000_000, documents=1000)
    needed = 5_000_000 + 2_500_000 + 20 * 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed))
    check_disk_space(config, expected)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 100_000))
    fault = fault_of(check_disk_space, config, expected)
    assert (fault.key, fault.value) == ("output_prefix", config.output_prefix)
    assert "7.5 MB" in fault.rule and "7.4 MB" in fault.rule
    folder = TokenPaths(config.output_prefix).work_folder
    folder.mkdir(parents=True)
    (folder / "0000000-000000000000000.json").touch()
    check_disk_space(config, expected)


def test_a_text_that_an_export_would_read_otherwise_is_seen_before_the_training(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Hebrew with points as it is typed: NFKC as tokenizers computes it puts them in another order."""
    lines = ["\u05e9\u05bc\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd \u05e2\u05d5\u05b9\u05dc\u05b8\u05dd"] * 40
    settings = {**foreign_models.STEP_1, "model_type": "unigram", "normalization_rule_name": "nmt_nfkc"}
    model = foreign_models.train(tmp_path / "nfkc.model", settings, lines, vocab_size=300)
    (tmp_path / "hebrew.jsonl").write_bytes(json_lines(lines))
    config = make_config(input_jsonl=(str(tmp_path / "hebrew.jsonl"),), input_tokenizer_file=str(model))
    fault = fault_of(tokenize, config, Options(tmp_path / "config.yaml"))
    assert fault.key == "input_tokenizer_file" and "no export could be proved" in fault.rule
    assert "identity" in fault.remedy


def test_only_for_a_tokenizer_that_can_be_exported(make_config: MakeConfig, corpus: Path, tmp_path: Path) -> None:
    config = make_config()
    files = find_files(config.input_jsonl, "")
    choice, expected, _ = estimate.prepare(config, files, Encoder(config.input_tokenizer_file))
    assert choice.name.startswith("sentencepiece")
    assert expected.documents == pytest.approx(300, rel=0.1) and expected.tokens > 10_000
    assert not expected.loss
    content = json.loads(foreign_models.byte_level(tmp_path / "lossy", LLAMA_3).read_bytes())
    loses = {"type": "Replace", "pattern": {"String": " "}, "content": "_"}
    (tmp_path / "lossy.json").write_text(json.dumps(content | {"normalizer": loses}), encoding="utf-8")
    _, expected, _ = estimate.prepare(config, files, open_encoder(tmp_path / "lossy.json", "<|eot_id|>"))
    assert "% of " in expected.loss and not expected.loss.startswith("0.")
    path = foreign_models.train(tmp_path / "llama.model", {**LLAMA, "user_defined_symbols": ["<a>"]})
    fault = fault_of(estimate.prepare, config, files, Encoder(path))
    assert fault.where == str(path) and "'<a>'" in fault.rule
