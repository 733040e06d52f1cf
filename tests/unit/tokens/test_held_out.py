"""Held-out text of the user's own: `valid_jsonl` is the validation split, whole, and nothing else is."""

import gzip
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from configs import config_of, fault_of
from corpus_files import COMPRESS, json_lines
from made_tokens import discard_work, encode, write_tokens
from megatron.core.datasets.indexed_dataset import IndexedDataset

from zerokara.base import manifest
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.samples.packed_tokens import DataPlan
from zerokara.steps import count_tokens
from zerokara.steps.command import Options
from zerokara.steps.tokenize import tokenize
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.encode import summary_rows
from zerokara.tokens.held_out import num_copies, num_valid_documents
from zerokara.tokens.indexed import TokenPaths, open_splits
from zerokara.training.planning.run_plan import make_plan, origin_notes
from zerokara.training.validation import LossValidation

TASK_BYTES = 4000
CPU = torch.device("cpu")
DATA = {"input_jsonl", "valid_jsonl", "input_tokenizer_file", "output_prefix"}


def texts(count: int, seed: int) -> list[str]:
    random = Random(seed)
    return [f"{i} " + " ".join(random.choices(["春 の", "the sea", "ice melts", "don't"], k=40)) for i in range(count)]


TRAIN, VALID = (texts(130, 1), texts(70, 2)), (texts(30, 3), ["one line", "and another"])


@pytest.fixture
def config(make_config: Callable[..., PretrainConfig], tmp_path: Path) -> PretrainConfig:
    (tmp_path / "a.jsonl").write_bytes(json_lines(TRAIN[0]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(TRAIN[1])))
    (tmp_path / "held.jsonl.zst").write_bytes(COMPRESS[".zst"](json_lines(VALID[0])))
    (tmp_path / "held.txt").write_text("\n".join(VALID[1]), encoding="utf-8")
    names = {"input_jsonl": ("a.jsonl", "b.jsonl.gz"), "valid_jsonl": ("held.jsonl.zst", "held.txt")}
    files = {key: [str(tmp_path / name) for name in each] for key, each in names.items()}
    return make_config(**files, output_model_dir=str(tmp_path / "run"))


def test_both_splits_hold_what_megatron_s_reader_expects(
    config: PretrainConfig,
) -> None:
    made = encode(config, TASK_BYTES)
    assert [tally.train.documents for tally in made.sources] == [130, 70, 0, 0]
    assert [tally.valid.documents for tally in made.sources] == [0, 0, 30, 2]
    paths, encoder = TokenPaths(config.output_prefix), Encoder(config.input_tokenizer_file)
    for prefix, sources in ((paths.train, TRAIN), (paths.valid, VALID)):
        expected = [[*encoder.encode(text).tolist(), encoder.eos_id] for source in sources for text in source]
        theirs = IndexedDataset(str(prefix))
        assert [ids.tolist() for ids in theirs] == expected
        assert theirs.document_indices.tolist() == list(range(len(expected) + 1))


def test_a_source_that_becomes_held_out_keeps_its_shards(config: PretrainConfig) -> None:
    encode(config, TASK_BYTES, stage="encode")
    entries = (*config.input_jsonl, config.valid_jsonl[0])
    other = config.model_copy(update={"input_jsonl": entries, "valid_jsonl": config.valid_jsonl[1:]})
    made = encode(other, TASK_BYTES)
    assert made.text_bytes == 0 and made.resumed_shards > 4
    assert [tally.valid.documents for tally in made.sources] == [0, 0, 0, 2]
    discard_work(other)


def test_the_manifest_the_counts_and_step_3_know_it(
    config: PretrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config.model_copy(update={"source_weights": (3.0, 1.0), "seq_len": 16})
    record = manifest.read(write_tokens(config).manifest)
    assert [len(record.inputs[key]) for key in ("input_jsonl", "valid_jsonl")] == [2, 2]
    assert (record.facts["train"]["documents"], record.facts["valid"]["documents"]) == (200, 32)
    assert not [*origin_notes(config, record)]
    ((_, note),) = origin_notes(config.model_copy(update={"valid_jsonl": config.valid_jsonl[:1]}), record)
    assert "with another valid_jsonl; if" in note
    tokenize(config, Options(tmp_path / "config.yaml"))
    assert "done already" in capsys.readouterr().out
    (tmp_path / "held.txt").write_text("another line", encoding="utf-8")
    assert fault_of(tokenize, config, Options(tmp_path / "config.yaml")).key == "valid_jsonl"
    reading = DataPlan.from_config(config)
    assert [source.name for source in reading.sources] == list(config.input_jsonl)
    held_out = [(source.name, source.num_valid_tokens > 0) for source in reading.held_out]
    assert held_out == [(name, True) for name in config.valid_jsonl] and reading.stages[0].weights == (3, 1)
    validation = LossValidation(make_plan(config_of(**config.model_dump(include=DATA), source_weights=[3, 1])), CPU)
    assert validation.source_names == list(config.valid_jsonl)
    count_tokens.count_tokens(config, Options(tmp_path / "config.yaml"))
    printed = capsys.readouterr().out
    assert "32 documents" in printed and "200 documents" in printed and "held.txt" not in printed


def test_a_copy_of_a_file_is_told(config: PretrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encode(config)
    assert "holds the same" not in capsys.readouterr().out
    (tmp_path / "copy (1).jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes())
    encode(config.model_copy(update={"valid_jsonl": (str(tmp_path / "copy (1).jsonl"),)}))
    assert f"copy (1).jsonl holds the same as {tmp_path / 'a.jsonl'}" in capsys.readouterr().out


def test_validation_documents_that_are_trained_on_are_counted(config: PretrainConfig, tmp_path: Path) -> None:
    """The same text in another file, and drawn from one that holds each of its documents twice."""
    (tmp_path / "again.jsonl.gz").write_bytes(gzip.compress(json_lines([*TRAIN[0][:40], *VALID[0]])))
    again = {"valid_jsonl": (str(tmp_path / "again.jsonl.gz"),)}
    (tmp_path / "twice.jsonl").write_bytes(json_lines(TRAIN[1] * 2))
    twice = {"input_jsonl": (str(tmp_path / "twice.jsonl"),), "valid_jsonl": (), "valid_min_documents": 3}
    for settings, number, of in (({}, 0, 32), (again, 40, 70), (twice, 3, 3)):
        made = config.model_copy(update=settings)
        rows = dict(summary_rows(made, encode(made), 1.0))
        expected = f"{number} of {of} validation documents are in the training text, too, word for word"
        assert rows.get("warning", expected).startswith(expected) and ("warning" in rows) == bool(number)
        train, valid = open_splits(made.output_prefix)
        assert valid is not None and num_copies(train, valid) == number


def test_what_is_trained_on_and_held_out_is_refused(config: PretrainConfig, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("", encoding="utf-8")
    os.link(tmp_path / "a.jsonl", tmp_path / "second_name.jsonl")
    for name in ("a.jsonl", "second_name.jsonl"):
        other = config.model_copy(update={"valid_jsonl": (str(tmp_path / name),)})
        fault = fault_of(tokenize, other, Options(tmp_path / "config.yaml"))
        assert name in fault.rule and "a.jsonl names already" in fault.rule
    (tmp_path / "empty.txt").write_text("\n\n", encoding="utf-8")
    empty = config.model_copy(update={"valid_jsonl": (str(tmp_path / "empty.txt"),)})
    assert fault_of(encode, empty).key == "valid_jsonl"


def test_a_fraction_beside_held_out_text_is_refused() -> None:
    assert fault_of(config_of, valid_jsonl=["held.txt"], valid_fraction=0.1).key == "valid_fraction"
    for fraction in (0, 0.01):
        assert config_of(valid_jsonl="held.txt", valid_fraction=fraction).valid_jsonl == ("held.txt",)


def test_a_prefix_may_not_be_that_of_anothers_validation_files(config: PretrainConfig, tmp_path: Path) -> None:
    other, options = (
        config.model_copy(update={"output_prefix": f"{config.output_prefix}_valid"}),
        Options(tmp_path / "c"),
    )
    tokenize(other, options)
    assert "which no run of this step wrote" in fault_of(tokenize, config, options).rule
    for path in TokenPaths(other.output_prefix).outputs:
        path.unlink()
    tokenize(config, options)
    assert "the name of the validation tokens of" in fault_of(tokenize, other, replace(options, redo=True)).rule


def test_half_of_an_odd_number_may_be_held_out() -> None:
    config = config_of(input_jsonl=["a.jsonl"], valid_fraction=0.5, valid_min_documents=1)
    assert [num_valid_documents(config, 0, number) for number in (2, 7, 8)] == [1, 3, 4]
