"""A run that starts from a Hugging Face folder starts with that model's loss, and learns from there."""

from collections.abc import Callable

import pytest
import rounding
from tiny import T5

from zerokara.huggingface import families, to_hf, tokenizer_json
from zerokara.model.shapes import ModelShape
from zerokara.tokenizer.encoder import Encoder

WATCHED = {"eval_interval": 1000}
"""Validated before the first step and after the last."""
LONGER = {
    "seq_len": 64, "global_batch_size": 4, "rope_theta": 20000.0,
    "rope_scaling": "{rope_type: yarn, factor: 2, original_max_position_embeddings: 32}",
}  # fmt: skip
SHORT = {"train_tokens": 8 * 8 * 32, "lr": 0.002}
# The unit tests of from_hf take every family there and back.
FAMILY_SETTINGS = {
    "llama": {"architecture": "llama"},
    "t5": T5,
    "mixtral": {"architecture": "mixtral", "num_experts": "3"},
}


@pytest.fixture(scope="module")
def runs(train_runs: Callable, span_data: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("init_from")
    data = {key: span_data[key] for key in ("input_tokenizer_file", "output_prefix")}
    settings = {name: {**data, **WATCHED, **family} for name, family in FAMILY_SETTINGS.items()}
    first = train_runs(settings, folder=folder)
    encoder = Encoder(span_data["input_tokenizer_file"])
    for name, run in first.items():
        place = folder / f"{name}_hf"
        place.mkdir()
        shape = ModelShape.from_json(run.state.shape)
        special = families.SpecialIds(encoder.bos_id, encoder.eos_id, encoder.pad_id)
        to_hf.write_model(place, run.weights, shape, special, "fp32", "4GB")
        tokenizer_json.write(encoder, place, model_max_length=shape.seq_len)
    onward = {
        f"{name}_on": {**each, **SHORT, "init_from": str(folder / f"{name}_hf")} for name, each in settings.items()
    }
    onward["longer"] = {**onward["llama_on"], **LONGER}
    onward["broken"] = {**onward["llama_on"], "stop_at": 4}
    second = train_runs(onward, folder=folder)
    train_runs({"broken": onward["llama_on"]}, folder=folder)
    small = {**settings["llama"], **SHORT, "num_layers": 1, "dropout": 0.1}
    teachers = str([str(folder / f"{name}_hf") for name in ("llama", "mixtral")])
    taught = {**small, "teachers": teachers, "teacher_weight": 0.7}
    third = train_runs({"alone": small, "taught": taught}, folder=folder)
    shared = {"shared": {**onward["llama_on"], "zero_stage": 3}, "taught, shared": {**taught, "zero_stage": 3}}
    return {**first, **second, **third, **train_runs(shared, processes=2, folder=folder)}


@pytest.mark.parametrize("name", FAMILY_SETTINGS)
def test_it_starts_where_the_model_stands_and_learns_on(runs: dict, name: str) -> None:
    first, second = runs[name], runs[f"{name}_on"]
    assert first.valid_losses[0] - first.valid_losses[-1] > 0.3, "nothing was learned: equality would mean nothing"
    rounding.assert_same_loss(second.valid_losses[0], first.valid_losses[-1])
    assert min(second.losses[-3:]) < second.losses[0]
    assert second.state.facts["init_from"] == str(first.folder.with_name(f"{name}_hf"))


def test_it_goes_on_with_longer_sequences(runs: dict) -> None:
    model, longer = runs["llama"], runs["longer"]
    assert longer.state.facts["context_length"] == 32 < longer.state.shape["seq_len"] == 64
    assert longer.valid_losses[-1] < longer.valid_losses[0] < model.valid_losses[0] - 0.3, "it begins with what it knew"


def test_a_run_that_has_begun_resumes_from_its_own_checkpoint(runs: dict) -> None:
    assert runs["broken"].losses == runs["llama_on"].losses


def test_processes_that_share_the_weights_start_alike(runs: dict) -> None:
    rounding.assert_same_curve(runs["shared"].losses, runs["llama_on"].losses)


def test_a_small_model_learns_from_larger_ones_on_any_number_of_processes(runs: dict) -> None:
    alone, taught = runs["alone"], runs["taught"]
    assert taught.losses[0] < alone.losses[0] - 0.5, "the teachers' entropy is no part of a divergence"
    assert alone.valid_losses[0] == taught.valid_losses[0]
    assert abs(alone.valid_losses[-1] - taught.valid_losses[-1]) > 1e-4
    rounding.assert_same_curve(runs["taught, shared"].losses, taught.losses)
