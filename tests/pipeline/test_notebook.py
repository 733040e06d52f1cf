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

from zerokara.examples.chat_template import auto_source
from zerokara.huggingface import tokenizer_json
from zerokara.tokenizer.encoder import Encoder

NOTEBOOK = "5_play_with_model.ipynb"
ENGLISH = "The model writes a text, and the text costs $5."
JAPANESE = "吾輩は猫である。名前はまだ無い。"
KOREAN = "나는 한국어를 읽는다."
LINES = [ENGLISH, JAPANESE, KOREAN]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A Hugging Face folder: a Llama with random weights, and a toy tokenizer of three languages."""
    folder = tmp_path / "hf"
    folder.mkdir()
    settings = {**STEP_1, "control_symbols": ["<|system|>", "<|user|>", "<|assistant|>"]}
    encoder = Encoder(foreign_models.train(folder / "tokenizer.model", settings, 20 * LINES, vocab_size=340))
    tokenizer_json.write(encoder, folder, model_max_length=CONTEXT)
    return evaluated_models.save(folder, AutoTokenizer.from_pretrained(folder), "llama")


def test_it_runs_from_top_to_bottom(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a conversation that grows beyond the context and is reset; the perplexity of a text longer than the context
    is that of a plain loop here."""
    lines: list[dict[str, float]] = [{"step": step, "loss": 5 / (1 + step / 10)} for step in range(1, 50)]
    lines += [{"step": step, "valid_loss": 2.0, "valid_bits_per_byte": 4 - step / 50} for step in (25, 49)]
    metrics = "".join(json.dumps(line) + "\n" for line in lines)
    (model_dir / "metrics.jsonl").write_text(metrics, encoding="utf-8")
    template = auto_source(Encoder(model_dir / "tokenizer.model"))
    (model_dir / "chat_template.jinja").write_text(template, encoding="utf-8")
    roles = {KOREAN: "user", "예": "assistant", "!": "user"}
    turns = [{"role": role, "content": content} for content, role in roles.items()]
    said = ["?", "!", "reset", "?", ""]
    typed = f"; input = lambda asked, lines=iter({said!r}): print(asked) or next(lines)"
    text = "\n".join(5 * LINES)
    edits = {"beginning": "prompts[1]", "text": repr(text), "messages": repr(turns) + typed, "max_new_tokens": "6"}
    done = execute(NOTEBOOK, model_dir, LINES, monkeypatch, **edits)

    shown = printed(done)
    assert "findfont" not in shown and "Glyph" not in shown, "a letter was drawn as an empty box"
    assert len(outputs(done, "image/png")) == 2  # the next tokens, and the curve
    assert "LlamaForCausalLM" in shown and f"▶ {JAPANESE}⟪" in shown
    assert f"user      ▶ {KOREAN}\nassistant ▶ 예\nuser      ▶ !\nassistant ▶ " in shown
    assert shown.count("assistant ▶ ") == 1 + 4 and shown.count("(a new conversation)\n") == 1
    assert "decoded again: the same text" in shown
    assert "validation: 3.500 → 3.020 bits per byte" in shown
    assert any("title='id " in html for html in outputs(done, "text/html"))

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


@pytest.mark.slow
def test_a_text_follows_the_token_that_a_tokenizer_puts_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = evaluated_models.save(tmp_path, evaluated_models.dummy_prefix(), "llama")
    shown = printed(execute(NOTEBOOK, folder, ["the fox"], monkeypatch, text='"the fox"', max_new_tokens="2"))
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokenizer("the fox")["input_ids"]])
    assert ids[0, 0] == tokenizer.bos_token_id != tokenizer.eos_token_id
    loss = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:])
    assert f"perplexity       {math.exp(loss):,.2f} " in shown


def test_without_a_model_it_says_which_step_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CellExecutionError) as raised:
        execute(NOTEBOOK, tmp_path, LINES, monkeypatch)
    assert f"bash 4_convert_to_HF.sh --config {tmp_path / 'my_convert_config.yaml'}" in str(raised.value)
