"""The whole of step 2's work: any number of workers, any cutting, any format; quarantine; failures leave nothing."""

import errno
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_tokens
import numpy as np
import pytest
from configs import fault_of
from foreign_models import QWEN_3, STEP_1, byte_level, train
from made_tokens import discard_work, run_in_this_process, write_tokens, written

from zerokara.base import manifest
from zerokara.base.errors import RunError
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.corpus.find import find_files
from zerokara.corpus.read import Range
from zerokara.steps.command import Options
from zerokara.steps.tokenize import tokenize
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.fast_encoder import without_gigatoken
from zerokara.tokens import merge
from zerokara.tokens.encode import encode_corpus, manifest_facts, summary_rows
from zerokara.tokens.indexed import IndexedTokens, TokenPaths, idx_path
from zerokara.tokens.merge import SourceTally
from zerokara.tokens.shards import Job, ShardTask, shard_path, write_shard

MakeConfig = Callable[..., PretrainConfig]


def _encode(config: PretrainConfig, task_bytes: int | None = None, **how: Any) -> list[SourceTally]:
    encoded = made_tokens.encode(config, task_bytes, **how)
    discard_work(config)
    return encoded.sources


def _good_texts(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").split("\n")
    return [text for line in lines if line not in ("", "{broken") and (text := json.loads(line)["text"])]


@pytest.mark.parametrize("task_bytes", [None, 3000])
def test_every_document_is_written_or_quarantined(
    make_config: MakeConfig, corpus: Path, task_bytes: int | None
) -> None:
    config = make_config(valid_fraction=0.1)
    (tally,) = _encode(config, task_bytes)
    paths, encoder = TokenPaths(config.output_prefix), Encoder(config.input_tokenizer_file)
    train, valid = IndexedTokens(paths.train), IndexedTokens(paths.valid)
    expected = [[*encoder.encode(text).tolist(), encoder.eos_id] for text in _good_texts(corpus)]
    found = [tokens[i].tolist() for tokens in (train, valid) for i in range(len(tokens))]
    assert len(expected) == 300 and Counter(map(tuple, found)) == Counter(map(tuple, expected))
    in_order = [document for document in expected if document in [valid[i].tolist() for i in range(len(valid))]]
    assert [valid[i].tolist() for i in range(len(valid))] == in_order and len(valid) == 30
    assert tally.documents_in == 303 == 300 + tally.skipped.total()
    assert tally.skipped == {"broken JSON": 1, "empty line": 1, "empty text": 1}
    assert (tally.train.documents, tally.valid.documents) == (270, 30)
    assert tally.train.tokens == len(train.tokens) and tally.valid.tokens == len(valid.tokens)
    all_bytes = sum(len(text.encode()) for text in _good_texts(corpus))
    assert tally.train.text_bytes + tally.valid.text_bytes == all_bytes
    assert sorted(written(config)) == sorted(path.name for path in paths.outputs) and len(paths.outputs) == 5
    content = corpus.read_bytes().splitlines(keepends=True)
    records = [json.loads(line) for line in paths.quarantine.read_text().splitlines()]
    bad = [(record["line"], record["reason"]) for record in records]
    assert bad == [(51, "broken JSON"), (52, "empty line"), (201, "empty text")]
    assert {record["file"] for record in records} == {str(corpus)} and records[0]["excerpt"] == "{broken"
    assert [record["offset"] for record in records] == [sum(map(len, content[: r["line"] - 1])) for r in records]


def test_each_source_gives_validation_documents(make_config: MakeConfig, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("".join(f"line {i}\n" for i in range(50)), encoding="utf-8")
    config = make_config(input_jsonl=[str(corpus), str(tmp_path / "b.txt")], valid_min_documents=7)
    first, second = _encode(config, task_bytes=500)
    assert (first.valid.documents, second.valid.documents) == (7, 7)
    assert (first.train.documents, second.train.documents) == (293, 43)
    assert len(IndexedTokens(TokenPaths(config.output_prefix).valid)) == 14


def test_a_mended_corpus_has_no_quarantine_and_no_validation_no_files(make_config: MakeConfig, corpus: Path) -> None:
    _encode(make_config())
    config = make_config(valid_fraction=0)
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in _good_texts(corpus)), encoding="utf-8")
    _encode(config)
    assert not TokenPaths(config.output_prefix).quarantine.exists()
    assert not idx_path(TokenPaths(config.output_prefix).valid).exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        # The empty line is counted among the reasons, but nothing is lost by it.
        ({"max_bad_fraction": 0.005}, ("2 of 302", "broken JSON 1", "empty text 1", "tokens_quarantine.jsonl")),
        ({"valid_min_documents": 151}, ("150",)),
    ],
)
def test_a_limit_leaves_quarantine(make_config: MakeConfig, settings: dict[str, float], words: tuple[str, ...]) -> None:
    config = make_config(**settings)
    fault = fault_of(_encode, config)
    assert {fault.key: fault.value} == settings and all(word in fault.rule + fault.remedy for word in words)
    assert list(written(config)) == ["tokens_quarantine.jsonl"]
    _encode(make_config(max_bad_fraction=0.007))


def test_a_corpus_without_a_document(make_config: MakeConfig, corpus: Path) -> None:
    for content, settings, key, rule in (
        ("\n\n\n", {}, "input_jsonl", "empty line 3"),
        ("{}\n{}\n", {}, "max_bad_fraction", "2 of 2"),
        ("{}\n{}\n", {"max_bad_fraction": 1.0}, "input_jsonl", "text field missing 2"),
    ):
        corpus.write_text(content, encoding="utf-8")
        fault = fault_of(_encode, make_config(**settings))
        assert fault.key == key and rule in fault.rule and "set it to" not in fault.remedy, "no share would do"
    corpus.write_text("", encoding="utf-8")
    assert "listed" not in fault_of(_encode, make_config()).remedy, "there is no such file"


def _failing(error: BaseException) -> Callable[..., Any]:
    def failing(*_: Any) -> Any:
        raise error

    return failing


def test_a_full_disk_while_merging_harms_nothing(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    _encode(config)
    before = written(config)

    monkeypatch.setattr(merge, "index_part", _failing(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(RunError, match="No space left on device"):
        _encode(config)
    assert written(config) == before


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), RunError, "No space left on device.*{folder}"),
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
    ],
)
def test_a_run_that_ends_without_a_shard_leaves_nothing(
    make_config: MakeConfig, error: BaseException, raised: type[BaseException], message: str
) -> None:
    config = make_config()
    folder = Path(config.output_prefix).parent
    with pytest.raises(raised, match=message.format(folder=re.escape(str(folder)))):
        _encode(config, run_tasks=_failing(error))
    assert not folder.exists()


def test_a_file_that_grows_or_goes_meanwhile(make_config: MakeConfig, corpus: Path) -> None:
    config = make_config()

    def growing(*arguments: Any) -> Any:
        yield from run_in_this_process(*arguments)
        with open(corpus, "a", encoding="utf-8") as file:
            file.write('{"text": "late"}\n')

    with pytest.raises(RunError, match=re.escape(str(corpus))):
        _encode(config, run_tasks=growing)
    files = find_files(config.input_jsonl, "")
    corpus.unlink()
    encoder = Encoder(config.input_tokenizer_file)
    with pytest.raises(RunError, match=r"cannot read or write .*corpus\.jsonl: No such file or directory"):
        encode_corpus(config, files, encoder, without_gigatoken(encoder, ""))


@pytest.mark.parametrize("byte_fallback", [True, False])
def test_what_does_not_come_back_is_counted_in_every_document(
    make_config: MakeConfig, corpus: Path, tmp_path: Path, byte_fallback: bool
) -> None:
    """Far behind what is sampled."""
    model = {**STEP_1, "byte_fallback": byte_fallback}
    path = train(tmp_path / "other.model", model, _good_texts(corpus), vocab_size=400)
    with open(corpus, "a", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in ("a \u2581 \u2581", "\u2581", "a\u0378b \u0378"))
    config = make_config(input_tokenizer_file=str(path))
    encoded = made_tokens.encode(config, 3000)
    encoder = Encoder(path)
    unknown = sum(int((encoder.encode(text) == encoder.unk_id).sum()) for text in _good_texts(corpus))
    assert (unknown > 1) != byte_fallback
    assert (encoded.space_marks, encoded.unknown) == (2, unknown)
    facts = manifest_facts(config, find_files(config.input_jsonl, ""), encoded, encoder)
    assert (facts["documents_with_space_mark"], facts["unknown_tokens"]) == (2, unknown)
    (lost,) = [text for name, text in summary_rows(config, encoded, 1.0) if name == "text lost"]
    assert "2 documents" in lost and "U+2581" in lost and ("<unk>" in lost) != byte_fallback
    place = byte_level(tmp_path / "bytes", QWEN_3, tokenizer_config={"eos_token": "<|endoftext|>"})
    other = make_config(input_tokenizer_file=str(place), output_prefix=str(tmp_path / "bytes" / "tokens"))
    encoded = made_tokens.encode(other)
    assert encoded.space_marks == encoded.unknown == 0, "a byte-level tokenizer keeps it"


@pytest.mark.parametrize("start", [[], [1]])
def test_texts_that_the_tokenizer_leaves_nothing_of(tmp_path: Path, start: list[int]) -> None:
    class Deaf:
        vocab_size, eos_id, start_id, unk_id = 70000, 2, start[0] if start else -1, 0

        def encode_joined(self, texts: Any) -> Any:
            ids = [i for text in texts for i in [*start, *[9] * (text != "\u200b"), 2]]
            return np.array(ids, dtype=np.int32), [len(text.encode()) for text in texts]

    path = tmp_path / "x.txt"
    path.write_text("a\n\u200b\n\nb\n", encoding="utf-8")
    files = find_files([str(path)], "")
    job = Job(Deaf(), tmp_path, "text", "line")
    result = write_shard(ShardTask("0-0", 0, (Range(files[0]),)), job)
    (held,) = result.ranges
    assert held.skipped == {"text without tokens": 1, "empty line": 1} and result.documents == 2
    assert np.fromfile(shard_path(tmp_path, "0-0", "bin"), np.int32).tolist() == [*start, 9, 2, *start, 9, 2]
    bad = [json.loads(line) for line in shard_path(tmp_path, "0-0", "bad").read_text(encoding="utf-8").splitlines()]
    assert [record["line"] for record in bad] == [2, 3]
    assert (result.tokens, result.disk_bytes) == (4 + 2 * len(start), path.stat().st_size)


def test_redo_takes_its_own_over(make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A person who types an interrupted command again must not lose its hours to the --redo in it."""
    config = make_config()
    before = write_tokens(config).manifest.read_bytes()
    tokenize(config, Options(tmp_path / "config.yaml"))
    assert "done already" in capsys.readouterr().out, "other rooms' tests train on what `write_tokens` writes"
    paths, options = TokenPaths(config.output_prefix), Options(tmp_path / "config.yaml", redo=True)
    assert paths.manifest.read_bytes() == before
    for stopped, resumed in ((False, 0), (True, 1)):
        if stopped:
            made_tokens.encode(config)
        tokenize(config, options)
        assert manifest.read(paths.manifest).facts["resumed_shards"] == resumed
