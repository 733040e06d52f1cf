"""Prompts → ids of the model's own tokenizer → answers as text; answers of before come from the cache."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from shapes import shape_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast
from wide_weights import spread_weights

from zerokara.base.durable import write_json
from zerokara.base.errors import RunError
from zerokara.evaluation import answers, cache, tasks
from zerokara.evaluation.answers import Answers
from zerokara.evaluation.inputs import TaskData
from zerokara.examples.facts import FinetuneFacts
from zerokara.examples.formats import Message
from zerokara.huggingface import families
from zerokara.huggingface.families import stock_model_of
from zerokara.huggingface.generation import _batches, context_length

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{n}" for n in range(60)), *(chr(each) for each in range(33, 127))]
SPECIAL = families.SpecialIds(bos=1, eos=2, pad=0)
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }} {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)


def tokenizer_of(template: str = "$A", chat_template: str | None = None) -> Any:
    """A tokenizer of words that white space separates; `template` is what it adds to a text."""
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = chat_template
    return tokenizer


def prompt_words(tokenizer: Any, prompt: Any, is_encoder_decoder: bool = False) -> str:
    return " ".join(WORDS[each] for each in answers.prompt_ids(tokenizer, prompt, is_encoder_decoder, [2]))


@pytest.mark.parametrize(
    ("template", "prompt", "expected"),
    [
        ("$A", "w1 w2", "w1 w2"),
        ("<s> $A", "w1 w2", "<s> w1 w2"),
        ("$A </s>", "w1 w2", "w1 w2"),
        # A control token that a prompt spells is the token, as in fine-tuning.
        ("$A", "w1 </s> w2", "w1 </s> w2"),
        ("$A", "w1 </s>", "w1 </s>"),
        ("$A </s>", "w1 </s>", "w1 </s>"),
        ("<s> $A </s>", "w1 </s> </s>", "<s> w1 </s> </s>"),
    ],
)
def test_a_prompt_is_encoded_as_a_text_but_for_a_decoders_end(template: str, prompt: str, expected: str) -> None:
    assert prompt_words(tokenizer_of(template), prompt) == expected
    assert prompt_words(tokenizer_of("$A </s>"), "w1 w2", is_encoder_decoder=True) == "w1 w2 </s>"


def test_a_conversation_goes_through_the_template() -> None:
    turns = [{"role": role, "content": f"w{n}"} for n, role in enumerate(("user", "assistant", "user"), 1)]
    assert prompt_words(tokenizer_of(chat_template=TEMPLATE), turns) == "u w1 </s> a w2 </s> u w3 </s> a"
    with pytest.raises(RunError, match="chat template"):
        prompt_words(tokenizer_of(), turns)


def test_a_prompt_longer_than_the_context_is_not_answered() -> None:
    shape = shape_of(len(WORDS), architecture="llama")
    model = stock_model_of(shape, spread_weights(shape), SPECIAL)
    long, full = (" ".join(["w1"] * length) for length in (shape.seq_len + 1, shape.seq_len))
    found = answers.answer(model, tokenizer_of(), ["w1", long, "w2", full], max_new_tokens=3)
    assert found.num_too_long == 1 and found.outputs[1] == "" and not found.stopped[1]
    others = answers.answer(model, tokenizer_of(), ["w1", "w2", full], max_new_tokens=3)
    assert [*found.outputs[:1], *found.outputs[2:]] == others.outputs and others.outputs[2]


def test_a_context_holds_for_an_encoder_decoder_with_positions_of_its_own_too() -> None:
    sides = ("encoder_layers", "encoder_attention_heads", "decoder_layers", "decoder_attention_heads")
    sizes = dict.fromkeys((*sides, "encoder_ffn_dim", "decoder_ffn_dim"), 1)
    config = BartConfig(vocab_size=len(WORDS), max_position_embeddings=8, d_model=8, **sizes)
    model = BartForConditionalGeneration(config).eval()
    asked = [" ".join(["w1"] * length) for length in (8, 9)]
    found = answers.answer(model, tokenizer_of("$A"), asked, max_new_tokens=20)
    assert found.num_too_long == 1 and context_length(model) == 8
    assert [*_batches([6] * 4, [8] * 4, None)] == [[0, 1, 2, 3]]
    opened = mock.Mock(model=model, tokenizer=tokenizer_of("$A"), context_length=8, is_encoder_decoder=True)
    opened.device = torch.device("cpu")
    with mock.patch.object(model, "generate", wraps=model.generate) as generate:
        answers.stream(opened, asked[0], 20, {})
    assert generate.call_args.args[0].shape == (1, 8) and generate.call_args.kwargs["max_new_tokens"] == 8


def test_an_answer_is_what_the_model_wrote_whatever_its_folder_would_close_up() -> None:
    tokenizer = tokenizer_of()
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece("##", cleanup=False)
    tokenizer.clean_up_tokenization_spaces = True
    ids = tokenizer("w1 ?")["input_ids"]
    assert tokenizer.decode(ids, **answers.AS_WRITTEN) == "w1 ?"


class Letters:
    """A tokenizer."""

    chat_template = ""

    def __call__(self, text: str, **_: Any) -> dict[str, list[str]]:
        return {"input_ids": list(text)}


class Parrot:
    """A model that always says the same; its weights are counted when they are asked for."""

    is_encoder_decoder, dtype, folder = False, "fp32", Path("nowhere")

    def __init__(self, name: str, says: str, log: list[str], content: str = "") -> None:
        self.name, self.says, self.content, self._log = name, says, content or name, log
        self.tokenizer = Letters()

    @property
    def model(self) -> Any:
        self._log.append(self.name)
        return self


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(model: Parrot, tokenizer: Any, prompts: Sequence[Any], *, max_new_tokens: int, label: str) -> Answers:
        return Answers([model.says] * len(prompts), [True] * len(prompts), max_new_tokens)

    monkeypatch.setattr(answers, "answer", answer)


def measure(models: list[Any], cache: Path | None) -> dict[str, dict[str, Any]]:
    """Values of two tasks with four examples, one of them with its own limit."""
    sources, references = [f"text {n}" for n in range(4)], ["0", "1"] * 2
    first = TaskData("first", "accuracy", sources, references, labels=("0", "1"))
    second = TaskData("second", "macro_f1", sources, references, labels=("0", "1"), max_new_tokens=4)
    sections = list(tasks.measure_tasks([(first, {}), (second, {})], models, seed=1, cache=cache))
    limits = [each.facts["max_new_tokens"][models[0].name] for each in sections]
    assert limits == [3, 4] and answers.num_tokens_allowed(models[0].tokenizer, ["12", "1234"]) == 6
    return {each.name: {row.model: row.value for row in each.rows} for each in sections}


def test_a_model_is_asked_as_it_was_fine_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the settings leave it open: its template, its words for the labels, its system message."""
    asked: list[Any] = []

    def answer(model: Parrot, tokenizer: Any, prompts: Sequence[Any], *, max_new_tokens: int, label: str) -> Answers:
        asked.append(prompts[0])
        return Answers(model.says.split(), [True] * len(prompts), max_new_tokens)

    monkeypatch.setattr(answers, "answer", answer)
    words = {"prompt_template": "Review: {input}\nVerdict:\n", "label_words": {"0": "bad", "1": "good"}}
    tuned, own = (Parrot(name, "bad good 1 bad", []) for name in ("tuned", "own"))
    facts = FinetuneFacts("text label", {}, "accuracy", "base", **words)  # type: ignore[arg-type]
    write_json(tmp_path / "finetune.json", asdict(facts))
    tuned.folder = tmp_path
    left_open = TaskData("t", "accuracy", ["a"] * 4, ["0", "1", "1", "1"], labels=("0", "1"))
    (found,) = tasks.measure_tasks([(left_open, {})], [tuned, own], seed=1, cache=None)  # type: ignore[list-item]
    assert asked == ["Review: a\nVerdict:\n", "a\n"] and [row.value for row in found.rows] == [50.0, 25.0]
    assert replace(left_open, prompt_template="Say {input}:").prompts(False, facts)[0] == "Say a:"
    assert left_open.prompts(is_encoder_decoder=True)[0] == "a"
    chat = FinetuneFacts("messages", {}, "loss", "base", system_prompt="Be brief.")
    turns: list[Message] = [{"role": "user", "content": "a"}]
    talk = TaskData("t", "exact_match", ["a"], ["b"], conversations=[turns])
    assert talk.prompts(False, chat) == [[{"role": "system", "content": "Be brief."}, *turns]]
    assert talk.prompts(False) == [turns]
    write_json(tmp_path / "finetune.json", asdict(chat))
    own.tokenizer.chat_template, own.says = "{{ messages }}", "b"
    models: list[Any] = [tuned, own]
    (found,) = tasks.measure_tasks([(talk, {})], models, seed=1, cache=None)
    rows = {row.model: row for row in found.rows}
    assert rows["tuned"].value is None and rows["own"].value is not None and asked[-1] == turns
    assert "no chat template" in rows["tuned"].notes[0], "and the others are measured"
    own.says = tuned.says
    (found,) = tasks.measure_tasks([(left_open, {})], models, seed=1, cache=None)
    assert [any("without its chat template" in note for note in row.notes) for row in found.rows] == [True, False]
    (found,) = tasks.measure_tasks([(talk, {})], [tuned], seed=1, cache=None)  # type: ignore[list-item]
    assert [row.value for row in found.rows] == [None] and found.baselines


@pytest.mark.usefixtures("answered")
def test_each_model_answers_all_tasks_in_turn_and_answers_are_kept_in_blocks_by_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "BLOCK_PROMPTS", 3)
    log: list[str] = []
    first = measure([Parrot("a", "0", log), Parrot("b", "none", log)], tmp_path)
    assert log == ["a"] * 4 + ["b"] * 4
    assert first == {
        "task: first, accuracy": {"a": 50.0, "b": 0.0},
        "task: second, macro f1": {"a": pytest.approx(100 / 3), "b": 0.0},
    }
    renamed = measure([Parrot("renamed", "-", log, content="a"), Parrot("c", "1", log)], tmp_path)
    assert log[8:] == ["c"] * 4, "the first was not asked again"
    assert [each["renamed"] for each in renamed.values()] == [each["a"] for each in first.values()]
    for block in tmp_path.glob("*/*.json"):
        block.write_text('{"outputs": ["0"', encoding="utf-8")
    measure([Parrot("a", "0", log)], tmp_path)
    assert len(log) == 16, "damaged blocks are asked again"
    monkeypatch.setattr(cache, "_PACKAGES", ("numpy",))
    measure([Parrot("a", "0", log)], tmp_path)
    assert len(log) == 20, "another version measures anew"


@pytest.mark.parametrize(("continues", "expected"), [(True, " với ก"), (False, "với ก")])
def test_what_a_model_writes_is_printed_character_by_character(
    capsys: pytest.CaptureFixture[str], continues: bool, expected: str
) -> None:
    """The tokens are bytes here, and the first space is lost, as in a tokenizer that puts one before every text."""
    printer = answers.Printer(lambda ids: bytes(ids).decode("utf-8", "replace").removeprefix(" "), continues)
    printer.put(torch.tensor([[*" đang tại".encode()]]))
    shown = []
    for byte in " với ก".encode():
        printer.put(torch.tensor([byte]))
        shown.append(capsys.readouterr().out)
    assert "".join(shown) == expected and shown[-4:-1] == [" ", "", ""], "at once, but no half of a character"
    printer.end()
    assert capsys.readouterr().out == "\n"
