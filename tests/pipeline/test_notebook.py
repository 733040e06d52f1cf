"""The notebook runs from top to bottom on a CPU, with a tiny model, and shows what it should."""

import json
import math
from pathlib import Path

import evaluated_models
import foreign_models
import pytest
import torch
from evaluated_models import CONTEXT
from foreign_models import STEP_1
from nbclient.exceptions import CellExecutionError
from pipeline.notebooks import execute, outputs, printed
from transformers import AutoModelForCausalLM, AutoTokenizer

from zerokara.examples.encoding import auto_source
from zerokara.huggingface import tokenizer_json
from zerokara.tokenizer.encoder import Encoder

NOTEBOOK = "5_play_with_model.ipynb"
ENGLISH = "The model writes a text, and the text costs $5."
JAPANESE = "吾輩は猫である。名前はまだ無い。"
KOREAN = "나는 한국어를 읽는다."
LINES = [ENGLISH, JAPANESE, KOREAN]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: a Llama with random weights, and a toy tokenizer of three languages."""
    folder = tmp_path_factory.mktemp("hf")
    settings = {**STEP_1, "control_symbols": ["<|system|>", "<|user|>", "<|assistant|>"]}
    encoder = Encoder(foreign_models.train(folder / "tokenizer.model", settings, 20 * LINES, vocab_size=340))
    tokenizer_json.write(encoder, folder, model_max_length=CONTEXT)
    return evaluated_models.save(folder, AutoTokenizer.from_pretrained(folder), "llama")


def test_it_runs_from_top_to_bottom(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, float]] = [{"step": step, "loss": 5 / (1 + step / 10)} for step in range(1, 50)]
    lines += [{"step": step, "valid_loss": 2.0, "valid_bits_per_byte": 4 - step / 50} for step in (25, 49)]
    metrics = model_dir / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    try:
        done = execute(NOTEBOOK, model_dir, LINES, monkeypatch, beginning="prompts[1]")
    finally:
        metrics.unlink()

    assert "findfont" not in printed(done) and "Glyph" not in printed(done), "a letter was drawn as an empty box"
    assert len(outputs(done, "image/png")) == 2  # the next tokens, and the curve
    shown = printed(done)
    assert "LlamaForCausalLM" in shown and f"▶ {JAPANESE}⟪" in shown
    assert "no chat template" in shown and "7_finetune.sh" in shown
    assert "perplexity" in shown and "bits per byte" in shown
    assert "decoded again: the same text" in shown
    assert "validation: 3.500 → 3.020 bits per byte" in shown
    assert any("title='id " in html for html in outputs(done, "text/html"))


def test_with_a_template_it_chats_and_perplexity_is_right(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run for both: a conversation that goes on, grows beyond the context and is reset; and the notebook's number
    for a text longer than the context, against a plain loop here, without a curve."""
    text = "\n".join(5 * LINES)
    roles = {KOREAN: "user", "예": "assistant", "!": "user"}
    turns = [{"role": role, "content": content} for content, role in roles.items()]
    template = model_dir / "chat_template.jinja"
    template.write_text(auto_source(Encoder(model_dir / "tokenizer.model")), encoding="utf-8")
    said = ["?", "!", "reset", "?", ""]
    typed = f"; input = lambda asked, lines=iter({said!r}): print(asked) or next(lines)"
    edits = {"text": repr(text), "messages": repr(turns) + typed, "temperature": "0", "max_new_tokens": "6"}
    try:
        done = execute(NOTEBOOK, model_dir, LINES, monkeypatch, **edits)
    finally:
        template.unlink()
    shown = printed(done)
    assert f"user      ▶ {KOREAN}\nassistant ▶ 예\nuser      ▶ !\nassistant ▶ " in shown
    assert shown.count("assistant ▶ ") == 1 + 4 and shown.count("(a new conversation)\n") == 1
    assert "no chat template" not in shown and "there is no curve to show" in shown
    assert len(outputs(done, "image/png")) == 1

    tokenizer, model = AutoTokenizer.from_pretrained(model_dir), AutoModelForCausalLM.from_pretrained(model_dir)
    ids = [2, *tokenizer(text)["input_ids"]]
    assert len(ids) > 2 * CONTEXT
    total = 0.0
    with torch.inference_mode():
        for position in range(1, len(ids)):
            start = (position - 1) // CONTEXT * CONTEXT
            logits = model(torch.tensor([ids[start:position]])).logits[0, -1].double()
            total -= logits.log_softmax(-1)[ids[position]].item()
    assert f"perplexity       {math.exp(total / (len(ids) - 1)):,.2f} " in shown
    assert f"bits per byte    {total / math.log(2) / len(text.encode()):.3f}" in shown


def test_without_a_model_it_says_which_step_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CellExecutionError) as raised:
        execute(NOTEBOOK, tmp_path, LINES, monkeypatch)
    assert f"bash 4_convert_to_HF.sh --config {tmp_path / 'my_convert_config.yaml'}" in str(raised.value)
