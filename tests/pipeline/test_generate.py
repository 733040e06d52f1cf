"""`python 5_generate.py`: a text or a chat from the command line, with the export's own settings."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import evaluated_models
import foreign_models
import pytest
import torch
from evaluated_models import CONTEXT
from foreign_models import STEP_1

from zerokara.examples.chat_template import auto_source
from zerokara.huggingface import proof, tokenizer_json
from zerokara.steps import generate
from zerokara.tokenizer.encoder import Encoder

PROMPT, TOKENS = "the fox the fox", 6
Run = Callable[..., str]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("hf")
    settings = {**STEP_1, "control_symbols": ["<|system|>", "<|user|>", "<|assistant|>"]}
    encoder = Encoder(foreign_models.train(folder / "tokenizer.model", settings, vocab_size=420))
    tokenizer_json.write(encoder, folder, model_max_length=CONTEXT)
    return evaluated_models.save(folder, AutoTokenizer.from_pretrained(folder), "llama")


@pytest.fixture
def run(exported: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the command; returns what it printed after its first line."""

    def run(*arguments: str, code: int = 0, folder: Path = exported) -> str:
        setting = f"output_tokenizer_and_model_dir={folder}"
        given = ["--config", "/dev/null", "--set", setting, "--tokens", str(TOKENS)]
        assert generate.main([*given, *arguments]) == code
        out, error = capfd.readouterr()
        return error if code else out.partition("\n")[2]

    return run


def expected(folder: Path, ids: list[int], tokens: int = TOKENS, **settings: object) -> str:
    """What plain transformers writes after some ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    made = model.generate(torch.tensor([ids]), max_new_tokens=tokens, pad_token_id=3, **settings)
    return str(tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True))


def test_a_prompt_that_is_no_text_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "error: the prompt: '\\udcff': must be UTF-8" in run("a\udcff", code=2)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    assert "error: the prompt: '\\udce9': must be UTF-8" in run(code=2)


def test_a_text_is_continued(exported: Path, run: Run) -> None:
    encoder = Encoder(exported / "tokenizer.model")
    greedy = expected(exported, encoder.prompt_ids(PROMPT), do_sample=False)
    assert run(PROMPT, "--temperature", "0").startswith(PROMPT + greedy)
    assert run("", "--temperature", "0").startswith(expected(exported, [encoder.eos_id], do_sample=False))
    first, same, other = (run(PROMPT, "--seed", seed) for seed in "112")
    torch.manual_seed(
        1
    )  # drawn from all tokens, as step 4's samples are: at a high temperature from unlikely ones, too
    drawn = {"do_sample": True, "top_k": 0, **proof.SAMPLING, "temperature": 9.0}
    words = re.findall(r"[a-z]+", expected(exported, encoder.prompt_ids(PROMPT), **drawn))
    hot = run(PROMPT, "--seed", "1", "--temperature", "9")[len(PROMPT) :].partition("\n…")[0]
    assert re.findall(r"[a-z]+", hot)[0] == words[0]  # a broken letter is shown otherwise
    assert first == same != other


def test_the_settings_of_the_export_count(exported: Path, run: Run) -> None:
    path = exported / "generation_config.json"
    before = path.read_text(encoding="utf-8")
    # Of one token the draw is the arg max; the penalty takes another one than without.
    own = {"do_sample": True, "top_k": 1, "repetition_penalty": 20.0}
    path.write_text(json.dumps(json.loads(before) | own), encoding="utf-8")
    try:
        ids = Encoder(exported / "tokenizer.model").prompt_ids(PROMPT)
        plain, penalised = (expected(exported, ids, 15, do_sample=False, repetition_penalty=by) for by in (1.0, 20.0))
        written = run(PROMPT, "--tokens", "15")[len(PROMPT) : -len("\n… (cut at the limit)\n")]
        # What is printed byte by byte may show a letter that the whole, broken, has not.
        assert plain != penalised and re.findall(r"\w+", written)[0] == re.findall(r"\w+", penalised)[0]
        assert re.findall(r"\w+", written)[-1] == re.findall(r"\w+", penalised)[-1] != re.findall(r"\w+", plain)[-1]
    finally:
        path.write_text(before, encoding="utf-8")


def test_lines_of_a_chat_are_turns(exported: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    template = exported / "chat_template.jinja"
    template.write_text(auto_source(Encoder(exported / "tokenizer.model")), encoding="utf-8")
    try:
        tokenizer = AutoTokenizer.from_pretrained(exported)

        def answer(turns: list[dict[str, str]]) -> str:
            ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
            return expected(exported, ids, do_sample=False)

        turns = [{"role": "user", "content": "a"}]
        first = answer(turns)
        turns += [{"role": "assistant", "content": first}, {"role": "user", "content": "b"}]
        second, anew = answer(turns), answer(turns[2:])
        assert second != anew
        monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\nreset\nb\n\nnever\n"))
        written = re.sub(r"… \(cut at the limit\)\n", "", run("--temperature", "0"))
        assert written == "".join(f"{text}\n" for text in (first, second, anew))
        assert run("b", "--temperature", "0").startswith(anew)
    finally:
        template.unlink()


def test_a_long_prompt_is_read_as_a_whole_or_what_is_left_out_is_told(exported: Path, run: Run) -> None:
    encoder, text = Encoder(exported / "tokenizer.model"), "the fox"
    while len(ids := encoder.prompt_ids(text)) < 0.8 * CONTEXT:
        text += f" {len(ids)} fox"
    room = CONTEXT - len(ids)
    answered = run(text, "--temperature", "0", "--tokens", str(CONTEXT))
    assert answered.startswith(text + expected(exported, ids, room, do_sample=False)) and "without" not in answered
    longer = " ".join([text] * 2)
    ids, room = encoder.prompt_ids(longer), CONTEXT // 2
    answered = run(longer, "--temperature", "0", "--tokens", str(CONTEXT))
    assert answered.startswith(longer + expected(exported, ids[-room:], room, do_sample=False))
    assert f"without the first {len(ids) - room} of {len(ids)} tokens of the prompt)" in answered


def test_what_cannot_be_used_is_refused(run: Run, tmp_path: Path) -> None:
    error = run(PROMPT, code=2, folder=tmp_path / "none")
    assert "output_tokenizer_and_model_dir" in error and "there is no such folder" in error and "step 4" in error
    for option in ("--temperature=-1", "--redo", "--tokens=0.5", f"--seed={2**63}", "--seed=-1"):
        with pytest.raises(SystemExit):
            run(PROMPT, option)
