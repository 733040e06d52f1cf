"""The tokenizer's files in an exported folder; tests/numerics compares the ids that they give."""

import json
from pathlib import Path
from typing import Any

import foreign_models
import pytest
from foreign_models import GEMMA, LLAMA, STEP_1, T5

from zerokara.huggingface import tokenizer_json
from zerokara.tokenizer.encoder import Encoder


@pytest.mark.parametrize(
    ("settings", "same_ids"),
    [
        (LLAMA, True),
        (GEMMA, True),
        (T5, False),
        ({**LLAMA, "remove_extra_whitespaces": True}, False),
        ({**STEP_1, "add_dummy_prefix": True}, False),
        (STEP_1, True),
    ],
    ids=["llama", "gemma", "t5", "trimming", "step 1 with a prefix", "step 1"],
)
def test_it_is_for_llama_cpp_where_ids_are_the_same(tmp_path: Path, settings: dict[str, Any], same_ids: bool) -> None:
    """llama.cpp puts a space before a text, and none before its further lines."""
    path = foreign_models.train(tmp_path / "trained.model", settings)
    encoder = Encoder(path)
    assert tokenizer_json.is_for_llama_cpp(encoder) == same_ids
    exported = tmp_path / "exported"
    exported.mkdir()
    if settings == {**STEP_1, "add_dummy_prefix": True}:
        return  # A prefix and a symbol together: no Hugging Face tokenizer either.
    written = tokenizer_json.write(encoder, exported, 64)
    assert {one.name for one in written} == {one.name for one in exported.iterdir()}
    assert (exported / tokenizer_json.SENTENCEPIECE_FILE).read_bytes() == path.read_bytes(), "step 7 opens it"
    model = exported / tokenizer_json.MODEL_FILE
    assert model.exists() == same_ids
    if same_ids:
        assert model.read_bytes() == path.read_bytes()
    config = json.loads((exported / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert ("add_prefix_space" in config) == (same_ids and not settings["add_dummy_prefix"])
