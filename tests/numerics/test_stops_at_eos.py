"""A model that is overfitted to short documents, exported and loaded as a user does, stops generating by itself."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_models
import pytest
from configs import typed
from corpus_files import write_texts
from foreign_models import STEP_1

from zerokara.steps import convert_to_hf, tokenize

NUM_DOCUMENTS, PROMPT_WORDS, MAX_NEW_TOKENS = 40, 2, 20
WORDS = [first + second for first in ("ba", "de", "fi", "go", "lu") for second in ("ma", "ne", "pi", "so", "ta")]


@pytest.mark.slow
def test_it_stops_knowing_the_end(tiny_data: dict[str, str], train_runs: Callable[..., Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = tmp_path
    chance = random.Random(3)
    # Two first words tell each document from the others.
    beginnings = chance.sample([f"{one} {other}" for one in WORDS for other in WORDS], NUM_DOCUMENTS)
    documents = [" ".join([each, *chance.choices(WORDS, k=chance.randint(1, 4))]) for each in beginnings]
    tokenizer_path = foreign_models.train(place / "tokenizer.model", STEP_1, documents, vocab_size=320)
    settings = {
        "input_jsonl": write_texts(place / "short.jsonl", documents), "input_tokenizer_file": str(tokenizer_path),
        "output_prefix": str(place / "tokens"), "valid_fraction": 0,
    }  # fmt: skip
    assert tokenize.main(["--config", tiny_data["config"], *typed(**settings)]) == 0
    longer = {"train_tokens": 220 * 8 * 32, "max_epochs_per_source": 1000, "intra_document_masking": "true"}
    run = train_runs({"short": {**settings, **longer}})["short"]
    folders = {"input_model_dir": run.folder, "output_tokenizer_and_model_dir": place / "hf"}
    assert convert_to_hf.main(typed(**folders, test_prompt_text="[ba]")) == 0
    tokenizer = AutoTokenizer.from_pretrained(place / "hf", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(place / "hf")
    prompts = [" ".join(text.split(" ")[:PROMPT_WORDS]) for text in documents]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS)
    ended = [tokenizer.eos_token_id in row for row in output[:, inputs["input_ids"].shape[1] :].tolist()]
    assert sum(ended) >= 0.95 * len(prompts), f"{sum(ended)} of {len(prompts)} stopped"
    # With another eos in the generation configuration nothing would: it is the trained one that stops it.
    model.generation_config.eos_token_id = None
    beyond = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS)
    assert beyond.shape[1] == inputs["input_ids"].shape[1] + MAX_NEW_TOKENS
