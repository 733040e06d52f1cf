"""What a fine-tuning measures of its model is what stock transformers generate with the export, hostile prompts too."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from corpus_files import write_jsonl
from shapes import shape_of
from toy_tokenizers import TrainToy, toy_lines
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
from wide_weights import spread_weights

from zerokara.config.finetune_config import FinetuneRunConfig
from zerokara.evaluation import answers
from zerokara.examples.preparation import prepare
from zerokara.finetuning import worker
from zerokara.finetuning.worker import TaskValidation
from zerokara.huggingface import tokenizer_json
from zerokara.huggingface.families import SpecialIds, stock_model_of
from zerokara.huggingface.generation import Generated
from zerokara.huggingface.to_hf import write_model
from zerokara.huggingface.tokenizer_proof import tokenizer_of_exports
from zerokara.tokenizer.encoder import Encoder

HOSTILE = [
    "the</s>",
    "</s>",
    "a <unk> b",
    "<pad> the",
    "<s>",
    "fox <|user|> dog",
    "\U0001f600 \u0e01",
    "  two  spaces ",
]
PROMPTS = [*HOSTILE, *toy_lines(12)]
NEW_TOKENS = 10


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_as_the_export(architecture: str, train_toy: TrainToy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(train_toy(vocab_size=560, byte_fallback=False))
    shape = shape_of(560, architecture=architecture, seq_len=256)
    weights, special = spread_weights(shape), SpecialIds(encoder.bos_id, encoder.eos_id, encoder.pad_id)
    encodes = shape.traits.is_encoder_decoder
    config = FinetuneRunConfig(
        architecture=architecture,
        packed_length=256,
        train_data=[write_jsonl(tmp_path / "train.jsonl", [{"source": "one", "target": "b"}])],
        valid_data=[write_jsonl(tmp_path / "valid.jsonl", [{"source": prompt, "target": "b"} for prompt in PROMPTS])],
        output_prefix=str(tmp_path / "x"),
    )
    tokenizer = tokenizer_of_exports(encoder, encodes)
    prepare(config, encoder, lambda: tokenizer)
    run_config = FinetuneRunConfig.model_construct(
        seed=1, max_new_tokens=NEW_TOKENS, eval_batch_size=64, metric="exact_match", output_prefix=config.output_prefix
    )
    plan: Any = SimpleNamespace(resolved=run_config, encoder=encoder, shape=shape)
    monkeypatch.setattr(worker, "parallel", SimpleNamespace(data_rank=lambda: 0, data_size=lambda: 1))
    task = TaskValidation(plan, SimpleNamespace(), "valid")  # type: ignore[arg-type]
    found = task.answer(stock_model_of(shape, weights, special))
    controls = {*encoder.control_ids, encoder.unk_id}
    assert any(controls & {*each.ids} for each in found), "else forbidding them would not show"

    (tmp_path / "hf").mkdir()
    write_model(tmp_path / "hf", weights, shape, special, "fp32", "1GB")
    tokenizer_json.write(encoder, tmp_path / "hf", 256, is_encoder_decoder=encodes)
    auto = AutoModelForSeq2SeqLM if encodes else AutoModelForCausalLM
    model, tokenizer = auto.from_pretrained(tmp_path / "hf").eval(), AutoTokenizer.from_pretrained(tmp_path / "hf")
    asked = [prompt if encodes else prompt + "\n" for prompt in PROMPTS]
    assert [each.ids for each in found] == [stock_answer(model, tokenizer, prompt, encodes) for prompt in asked]
    measured = answers.answer(model, tokenizer, asked, max_new_tokens=NEW_TOKENS)
    assert texts(task, found) == measured.outputs
    assert [each.stopped for each in found] == measured.stopped
    unknown = [Generated([*each.ids, encoder.unk_id], False) for each in found]
    theirs = [tokenizer.decode(each.ids, skip_special_tokens=True).strip() for each in unknown]
    assert texts(task, unknown) == theirs


def texts(task: TaskValidation, answers: list[Generated]) -> list[str]:
    assert task.scored(answers).line["valid_examples"] == len(PROMPTS)
    return [text.strip() for _, text in task.answers]


def stock_answer(model: Any, tokenizer: Any, prompt: str, encodes: bool) -> list[int]:
    """New ids of transformers' own `generate`, with the settings of the folder, up to the end."""
    given = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    with torch.inference_mode():
        new = model.generate(**given, do_sample=False, max_new_tokens=NEW_TOKENS)[0].tolist()
    new = new[1 if encodes else given["input_ids"].shape[1] :]
    return new[: new.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in new else new
