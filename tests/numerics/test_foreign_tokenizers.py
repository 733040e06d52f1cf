"""Continued pretraining of models whose tokenizers step 1 did not make: from a folder as it lies on the Hub, through
steps 2, 3 and 4, with the ids of SentencePiece or of tokenizers all the way.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import foreign_models
import pytest
import rounding
import torch
import transformers
from configs import fault_of, typed
from corpus_files import write_texts
from foreign_models import LLAMA, QWEN_3, T5, documents
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tiny import T5 as T5_SETTINGS
from tiny import Trained
from token_sources import data_plan

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.huggingface import families, from_hf
from zerokara.model.shapes import ModelShape
from zerokara.publishing import exported_folder
from zerokara.samples.batches import Batches, BatchLayout
from zerokara.samples.objective import objective
from zerokara.steps import convert_to_hf, tokenize
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.hugging_face import open_encoder


@dataclass(frozen=True)
class Continued:
    """A foreign model, the run that continued it, and the export of that run."""

    start: Path
    tokenizer: Path
    settings: PretrainConfig
    run: Trained
    exported: Path

    @property
    def encoder(self) -> Encoder:
        return open_encoder(self.tokenizer)


FAMILY = {
    "llama": (LLAMA, {"architecture": "llama"}, "LlamaTokenizer", "tokenizer.model", 1, 4.0),
    "qwen3": (None, {"architecture": "qwen3"}, "Qwen2Tokenizer", "", 128, 4.0),
    "t5": (T5, {**T5_SETTINGS, "tie_word_embeddings": "false"}, "T5Tokenizer", "spiece.model", 128, 0.4),
}
"""Settings of the tokenizer and of the model, transformers' class of the tokenizer, the name of its file, what the rows
of the embedding are a multiple of (T5's has 32,128 for 32,100 ids), and what makes the logits neither flat nor wild."""


def make_start(folder: Path, name: str, texts: list[str], given: dict[str, str]) -> None:
    """A Hugging Face folder of random weights, with SentencePiece's file or a tokenizer.json, as the originals."""
    trainer, _, tokenizer_class, file_name, multiple, scale = FAMILY[name]
    folder.mkdir()
    named = {"tokenizer_class": tokenizer_class}
    if trainer is None:
        named |= {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "bos_token": None}
        foreign_models.byte_level(folder, QWEN_3, texts, tokenizer_config=named)
    else:
        foreign_models.train(folder / file_name, trainer, texts)
        (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    settings = load(PretrainConfig, "/dev/null", [f"{key}={value}" for key, value in given.items()])
    encoder = open_encoder(folder)
    rows = -(-encoder.vocab_size // multiple) * multiple
    shape = ModelShape.from_config(settings, rows)
    made = families.hf_config(shape, families.SpecialIds(None, encoder.eos_id, encoder.pad_id), "fp32")
    torch.manual_seed(3)
    model = getattr(transformers, families.FAMILIES[name].auto_class).from_config(made)
    for parameter in model.parameters():
        parameter.data.mul_(scale if parameter.ndim > 1 else 1)
    for copy in families.FAMILIES[name].copies:
        model.get_parameter(copy).data.copy_(model.get_input_embeddings().weight)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def continued(
    train_runs: Callable[..., dict[str, Trained]], tiny_data: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Continued]:
    """Steps 2, 3 and 4, from a folder of each family."""
    place, texts = tmp_path_factory.mktemp("continued"), documents(120)
    corpus = write_texts(place / "corpus.jsonl", texts)
    given: dict[str, dict[str, str]] = {}
    for name, (_, family, _, file_name, *_) in FAMILY.items():
        start = place / name
        given[name] = {
            **{key: value for key, value in tiny_data.items() if key != "config"},
            "input_jsonl": corpus,
            "output_prefix": str(place / f"{name}_tokens"),
            "input_tokenizer_file": str(start / file_name),
            "init_from": str(start),
            "train_tokens": str(4 * 8 * 32),
            "model_size": "",  # the shape is written here
            **family,
        }
        make_start(start, name, texts, given[name])
        assert tokenize.main(typed(**given[name])) == 0
    (place / "runs").mkdir()
    made = {}
    for name, run in train_runs(given, folder=place / "runs").items():
        hf = place / f"{name}_hf"
        asked = {"input_model_dir": run.folder, "output_tokenizer_and_model_dir": hf, "check_lines": 300}
        assert convert_to_hf.main(typed(**asked, test_prompt_text="[the fox]")) == 0
        settings = load(PretrainConfig, run.folder / "config_resolved.yaml")
        made[name] = Continued(place / name, Path(given[name]["input_tokenizer_file"]), settings, run, hf)
    return made


@pytest.mark.parametrize("name", FAMILY)
def test_training_begins_with_the_loss_of_the_model(continued: dict[str, Continued], name: str) -> None:
    made = continued[name]
    encoder, reading = made.encoder, data_plan(made.settings)
    shape = ModelShape.from_config(made.settings, encoder.vocab_size)
    from_hf.check_source(made.start, shape, encoder, new_embeddings="none", fault=made.settings.fault)
    layout = BatchLayout(made.settings.global_batch_size, made.settings.global_batch_size)
    of_run = objective(made.settings, encoder, made.settings.seed, False)
    (read,) = Batches(reading.tokens(), reading.order(), layout, of_run).at(0)
    family = families.FAMILIES[name]
    model = getattr(transformers, family.auto_class).from_pretrained(made.start, dtype=torch.float32)
    labels = torch.from_numpy(read.labels)
    with torch.no_grad():
        beside = {"labels": labels} if family.is_encoder_decoder else {}
        logits = model(input_ids=torch.from_numpy(read.inputs), **beside).logits[..., : encoder.vocab_size]
    theirs = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    rounding.assert_same_loss(made.run.losses[0], theirs)
    assert logits.std() > 0.5, "the model says nothing: equality would mean nothing"


@pytest.mark.parametrize("name", FAMILY)
def test_the_export_is_proved_and_of_one_piece(continued: dict[str, Continued], name: str) -> None:
    made, encoder = continued[name], continued[name].encoder
    found = exported_folder.proved(made.exported).facts["proof"]["token_ids"]
    assert found["holds"] and found["lines"] >= 300 and found["equal"] + found["ties"] == found["lines"]
    of_model = transformers.AutoConfig.from_pretrained(made.exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(made.exported)
    assert of_model.vocab_size == len(tokenizer) == encoder.vocab_size
    ids = (of_model.eos_token_id, of_model.pad_token_id, of_model.bos_token_id)
    assert ids == (encoder.eos_id, encoder.pad_id, 1 if name == "llama" else None)
    assert ids == (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id)
    if name == "t5":
        assert tokenizer.convert_tokens_to_ids("<extra_id_0>") == encoder.vocab_size - 1 == encoder.sentinel_ids[0]
        assert of_model.decoder_start_token_id == 0


def test_the_files_of_a_tokenizer_json_go_all_the_way_and_megatron_reads_its_tokens(
    continued: dict[str, Continued],
) -> None:
    made, encoder = continued["qwen3"], continued["qwen3"].encoder
    for place in (made.exported, made.run.folder / "tokenizer"):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (place / name).read_bytes() == (made.start / name).read_bytes()
    assert not list(made.exported.glob("*.model"))
    tokens = IndexedDataset(made.settings.output_prefix + "_text_document")
    texts = [encoder.decode(tokens[number]) for number in range(len(tokens))]
    assert all(tokens[number][-1] == encoder.eos_id for number in range(len(tokens)))
    assert len(texts) > 100 and {*texts} < {*documents(120)}


def test_surplus_rows_are_left_out_where_no_token_has_them(continued: dict[str, Continued], tmp_path: Path) -> None:
    made = continued["t5"]
    encoder, settings = made.encoder, made.settings
    shape = ModelShape.from_config(settings, encoder.vocab_size)
    rows = transformers.AutoConfig.from_pretrained(made.start).vocab_size
    assert rows > encoder.vocab_size
    named = tmp_path / "named"
    shutil.copytree(made.start, named)
    tokenizer = transformers.AutoTokenizer.from_pretrained(named)
    tokenizer.add_tokens(["<further>"])
    tokenizer.save_pretrained(named)
    fault = fault_of(from_hf.check_source, named, shape, encoder, new_embeddings="none", fault=settings.fault)
    assert fault.key == "input_tokenizer_file" and f"id {encoder.vocab_size}: here '', there '<further>'" in fault.rule
