"""Examples become token files: borders and ends, every format, every fault with its line, and counts that close."""

import pickle
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from configs import refused
from corpus_files import write_jsonl
from toy_tokenizers import TrainToy

from zerokara.base.errors import UserError
from zerokara.config.data import packed
from zerokara.config.finetune_config import FinetuneRunConfig
from zerokara.examples.encoding import fit
from zerokara.examples.example_files import ExampleFiles, prompt_of, read_task_examples
from zerokara.examples.preparation import prepare
from zerokara.finetuning import task
from zerokara.huggingface.tokenizer_proof import tokenizer_of_exports
from zerokara.samples.packed_examples import PackedExamples, pair_lengths
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.indexed import IndexedTokens

PAIRS = [{"source": f"the fox {n}\nof {n * n}", "target": f'"42" dogs {n}'} for n in range(40)]


@pytest.fixture(scope="module")
def encoder(train_toy: TrainToy) -> Encoder:
    return Encoder(train_toy(vocab_size=560))


def prepared(folder: Path, encoder: Encoder, records: Sequence[Any] = (), **settings: Any) -> ExampleFiles:
    """Prepare records as training examples; without validation examples unless `settings` ask for them.

    Beside settings there may be `is_encoder_decoder`, `length` and `redo`.
    """
    is_encoder_decoder, redo = settings.pop("is_encoder_decoder", False), settings.pop("redo", False)
    settings |= {"packed_length": settings.pop("length", 200), "architecture": "t5" if is_encoder_decoder else "llama"}
    if records:
        settings["train_data"] = [write_jsonl(folder / "train.jsonl", records)]
    settings = {"valid_fraction": 0, "output_prefix": str(folder / "out" / "x"), **settings}
    config = FinetuneRunConfig(**settings)
    tokenizer = partial(tokenizer_of_exports, encoder, is_encoder_decoder)
    return prepare(config, encoder, tokenizer, redo)


def segments(files: ExampleFiles, number: int = 0) -> list[list[int]]:
    return [ids.tolist() for ids in IndexedTokens(files.train.prefix).sequences(number)]


def told(folder: Path, encoder: Encoder, records: Sequence[Any], **settings: Any) -> list[str]:
    faults = refused(prepared, folder, encoder, records, **settings)
    assert {path.name for path in (folder / "out").glob("*")} <= {"x_examples_quarantine.jsonl"}
    return list(map(str, faults))


def test_borders_are_those_of_generation(tmp_path: Path, train_toy: TrainToy) -> None:
    """What is learned after the prompt alone, which a model is given, is the answer alone, and one end."""
    encoder = Encoder(train_toy(vocab_size=560, add_dummy_prefix=True))  # a space before each line
    pairs = [{"source": one["source"], "target": f"ox 42\n {one['target']}"} for one in PAIRS]
    files = prepared(tmp_path, encoder, pairs, prompt_template="{input} the f")
    joined_differs = 0
    for number, pair in enumerate(pairs):
        read, learned = segments(files, number)
        prompt = f"{pair['source']} the f"
        assert read == prompt_of([read, learned]) == encoder.prompt_ids(prompt)
        assert learned == [*encoder.encode(pair["target"]), encoder.eos_id]
        assert learned.count(encoder.eos_id) == 1 and encoder.decode(learned) == pair["target"]
        joined_differs += encoder.encode(prompt + pair["target"]).tolist() != read + learned[:-1]
    assert joined_differs == len(pairs), "the broken twin: as one text they have the piece fox across the border"


def test_lines_that_cannot_be_learned_are_counted_and_quoted_fields_told(
    tmp_path: Path, encoder: Encoder, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = told(tmp_path, encoder, [*PAIRS, *[{"source": "x", "target": "the fox " * 200}] * 7])
    assert len(faults) == 6 and faults[-1] == "2 more lines: cannot be learned either"
    table = tmp_path / "x.tsv"
    table.write_text('text\tlabel\nso\t1\n"so ""on"""\t0\n"a\t1\n', encoding="utf-8")
    files = prepared(tmp_path, encoder, train_data=[str(table)])
    assert encoder.decode(segments(files, 1)[0]) == '"so ""on"""\n'
    assert "in 1 line of tables a field is in quotation marks" in capsys.readouterr().out


FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "source_target": ({"source": "a", "target": "b"}, {}, "a\n", "b"),
    "prompt_completion": ({"prompt": "a", "completion": "b", "text": "c"}, {}, "a\n", "b"),
    "text_label": ({"text": "a", "label": 1}, {"label_words": {"0": "bad", "1": "good"}}, "a\n", "good"),
    "document": ({"id": "7", "document": "a", "label": "x"}, {}, "a\n", "x"),
    "sentence": ({"sentence": "a", "label": True}, {}, "a\n", "true"),
    "truth": ({"text": "a", "label": False}, {"label_words": {"true": "good", "false": "bad"}}, "a\n", "bad"),
    "truth as text": ({"text": "a", "label": "true"}, {"label_words": {"true": "good", "false": "bad"}}, "a\n", "good"),
    "float": ({"text": "a", "label": 1.0}, {"label_words": {"0": "bad", "1": "good"}}, "a\n", "good"),
    "number as text": ({"text": "a", "label": "1"}, {"label_words": {"0": "bad", "1": "good"}}, "a\n", "good"),
    "no words": ({"text": "a", "label": 1.0}, {}, "a\n", "1"),
    "review": ({"review": "a", "label": 0.5}, {"prompt_template": "Rate: {input}\nAs: "}, "Rate: a\nAs: ", "0.5"),
    "named": ({"x": "a", "y": "b"}, {"input_field": "x", "output_field": "y"}, "a\n", "b"),
    "half named": ({"x": "a", "target": "b"}, {"input_field": "x"}, "a\n", "b"),
    "asked for": ({"source": "s", "target": "t", "text": "a", "label": "b"}, {"data_format": "text_label"}, "a\n", "b"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(tmp_path: Path, encoder: Encoder, name: str) -> None:
    record, settings, read, learned = FORMATS[name]
    files = prepared(tmp_path, encoder, [record], **settings)
    assert segments(files) == [encoder.encode(read).tolist(), [*encoder.encode(learned), encoder.eos_id]]
    assert files.data_format == (name if name in ("source_target", "prompt_completion") else files.data_format)
    assert files.labels == sorted(settings.get("label_words", {}).values() or ([learned] if "label" in record else []))
    assert files.max_new_tokens > files.train.counts.longest_answer == len(segments(files)[1])


def conversation(*turns: str) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(turns)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]}


TURN = {"role": "user", "content": "a"}


def weighed(*turns: tuple[str, Any], **more: Any) -> dict[str, Any]:
    """A conversation of answers with weights."""
    pairs = [
        ({"role": "user", "content": "a"}, {"role": "assistant", "content": text, "weight": w}) for text, w in turns
    ]
    return {"messages": [turn for pair in pairs for turn in pair], **more}


def test_what_has_weight_0_is_not_learned(tmp_path: Path, encoder: Encoder, capsys: pytest.CaptureFixture[str]) -> None:
    records = [
        weighed(("one", 0), ("two", 1), ("three", 0)),
        weighed(("one", None), ("two", True), source="x", tools=[]),
    ]
    files = prepared(tmp_path, encoder, records, valid_data=[write_jsonl(tmp_path / "v.jsonl", records)])
    learned = [[encoder.decode(ids) for ids in segments(files, number)[1::2]] for number in range(2)]
    assert learned == [["two"], ["one", "two"]] and "one" in encoder.decode(segments(files)[0])
    found = read_task_examples(files.splits["valid"], None, 1)
    assert [answer for _, answer in found] == ["two", "two"] and found[0][0] == segments(files)[0]
    assert "not read are the fields source, tools" in capsys.readouterr().out


def test_a_template_without_a_system_role_is_told_with_the_line(tmp_path: Path, encoder: Encoder) -> None:
    template = tmp_path / "t.jinja"
    roles = "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% elif m.role == 'user' %}<|user|>"
    roles += "{{ m.content }}{% else %}<|assistant|>{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    asked = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    template.write_text(f"{{% for m in messages %}}{roles}{{% endif %}}{{% endfor %}}{asked}", encoding="utf-8")
    settings: dict[str, Any] = {"chat_template": str(template), "valid_fraction": 0.2}
    assert prepared(tmp_path, encoder, [conversation(f"a{n}", "b") for n in range(9)], **settings).train.counts.bad == 0
    faults = told(
        tmp_path / "b", encoder, [conversation(f"a{n}", "b") for n in range(9)], system_prompt="x", **settings
    )
    assert "train.jsonl:1" in faults[0] and "no system role" in faults[0]


def test_calls_of_tools_are_part_of_the_right_answer(tmp_path: Path, encoder: Encoder) -> None:
    """As the template writes them, where it does."""
    template = tmp_path / "t.jinja"
    turn = "{% if m.role == 'assistant' %}<|assistant|>{% generation %}{{ m.content + (m.tool_calls | tojson if "
    turn += "m.tool_calls else '') + eos_token }}{% endgeneration %}{% else %}{{ '<|user|>' + m.content }}{% endif %}"
    asked = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    template.write_text(f"{{% for m in messages %}}{turn}{{% endfor %}}{asked}", encoding="utf-8")
    record = {"messages": [TURN, {"role": "assistant", "content": None, "tool_calls": [{"name": "weather"}]}]}
    held_out = [write_jsonl(tmp_path / "v.jsonl", [record])]
    files = prepared(tmp_path, encoder, [record], valid_data=held_out, chat_template=str(template))
    ((_, answer),) = read_task_examples(files.splits["valid"], None, 1)
    assert answer == encoder.decode(segments(files)[1]) == '[{"name": "weather"}]'
    assert "'tool_calls'" in told(tmp_path / "b", encoder, [record])[0]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (weighed(("one", 0)), "weight 0"),
        (weighed(("one", 0.5)), "weight 0.5"),
        (weighed(("one", 1), weight=0), "'weight'"),
        (weighed(("one", 1), tools=[{"name": "x"}]), "'tools'"),
        (weighed(("one", 1), kto_tag=False), "'kto_tag'"),
        (weighed(("one", 1), images=["x.png"]), "'images'"),
        ({"messages": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "from, value"),
        ({"messages": [{**TURN, "content": [{"type": "text", "text": "a"}]}]}, "content that is text"),
        ({"messages": ["a"]}, "lacks a role"),
    ],
)
def test_what_changes_an_example_is_honoured_or_makes_it_bad_by_name(
    tmp_path: Path, encoder: Encoder, record: Any, said: str
) -> None:
    good = [weighed(("one", 1))] * 10
    assert prepared(tmp_path, encoder, [*good, record], max_bad_fraction=0.2).train.counts.bad == 1
    (line,) = (tmp_path / "out" / "x_examples_quarantine.jsonl").read_bytes().splitlines()
    assert said in orjson.loads(line)["reason"]
    (message,) = told(tmp_path / "b", encoder, [*good, record], max_bad_fraction=0)
    assert said in message and "train.jsonl:11" in message


PAIR, TOO_LONG = {"source": "a", "target": "b"}, {"source": "a", "target": "b " * 90}
LABEL = {"text": "a", "label": 0}


@pytest.mark.parametrize(
    ("good", "record", "settings", "said"),
    [
        (PAIR, {"source": "a", "target": " "}, {}, ["'target' is empty"]),
        (LABEL, {"text": "a", "label": 7}, {"label_words": {"0": "bad"}}, ["label = '7'", "label_words", "0: bad"]),
        (PAIR, {"source": "a " * 90, "target": "b"}, {}, ["packed_length is 40", "overlong"]),
        (PAIR, TOO_LONG, {"overlong": "cut_prompt"}, ["the answer has"]),
        (PAIR, TOO_LONG, {}, ["the answer has", "overlong: drop"]),
        (conversation("a", "b"), conversation("a", "b", "c"), {}, ["ends with the turn of 'user'"]),
        (conversation("a", "b"), conversation("a", " "), {}, ["empty"]),
        (
            LABEL,
            {"text": "a", "label": True},
            {"label_words": {"0": "bad"}},
            ["label = 'true'", "label_words", "0: bad"],
        ),
    ],
)
def test_a_line_that_cannot_be_learned_is_an_error(
    tmp_path: Path, encoder: Encoder, good: Any, record: Any, settings: dict[str, Any], said: list[str]
) -> None:
    (message,) = told(tmp_path, encoder, [good, record], length=40, **settings)
    assert message.startswith(f"{tmp_path / 'train.jsonl'}:2: ") and all(part in message for part in said), message


def test_several_such_lines_are_told_at_once_and_a_label_without_a_word_once(tmp_path: Path, encoder: Encoder) -> None:
    records = [{"source": "a", "target": text} for text in ["b", "", "c", *[""] * 9]]
    *first, more = told(tmp_path, encoder, records)
    assert [each.split(":")[1] for each in first] == ["2", "4", "5", "6", "7"] and more.startswith("5 more lines: ")
    records = [{"text": "a", "label": label} for label in [0, 1, 1, 2, 1, 0]]
    faults = told(tmp_path, encoder, records, label_words={"0": "bad"})
    assert [each.split(":")[1] for each in faults] == ["2", "4"]


@pytest.mark.parametrize(
    ("record", "settings", "said"),
    [
        ({"a": 1, "b": 2}, {}, ["data_format", "train.jsonl", "a, b", "input_field"]),
        (PAIR, {"data_format": "messages"}, ["source, target"]),
        (PAIR, {"input_field": "x"}, ["source, target"]),
        (PAIR, {"label_words": {"0": "x"}}, ["label_words", "source_target"]),
        (PAIR, {"metric": "accuracy", "valid_fraction": 0.5}, ["metric"]),
        (PAIR, {"chat_template": "x.jinja"}, ["x.jinja"]),
        (PAIR, {"system_prompt": "x"}, ["system_prompt", "source_target"]),
        (conversation("a", "b"), {"prompt_template": "x{input}"}, ["prompt_template", "chat_template"]),
        (PAIR, {"valid_fraction": 0.1}, ["valid_fraction", "each of the 2 training examples"]),
        (PAIR, {"test_data": ["FOLDER/train.jsonl"]}, ["test_data", "train_data too"]),
    ],
)
def test_bad_settings(tmp_path: Path, encoder: Encoder, record: Any, settings: dict[str, Any], said: list[str]) -> None:
    if "test_data" in settings:
        settings = {"test_data": [str(tmp_path / "train.jsonl")]}
    (message,) = told(tmp_path, encoder, [record, record], **settings)
    assert all(part in message for part in said), message


BAD = [{"source": "a"}, {"source": None, "target": "b"}, {"source": 1, "target": "b"}, {"source": "", "target": "b"}]


def test_bad_lines_go_to_the_quarantine_and_counts_close(tmp_path: Path, encoder: Encoder) -> None:
    bad = [*BAD, {"source": "\0", "target": "b"}, [1]]
    long = [{"source": "the fox " * 90, "target": "b"}] * 3
    settings = {"max_bad_fraction": 0.2, "length": 60}
    kept = prepared(tmp_path, encoder, [*PAIRS, *bad, *long], overlong="drop", **settings)
    counts = kept.train.counts
    assert (counts.kept, counts.cut, counts.dropped, counts.bad) == (40, 0, 3, 6)
    assert counts.read == len(PAIRS) + len(bad) + len(long) and kept.train.num_examples == 40
    lines = [
        orjson.loads(line) for line in (tmp_path / "out" / "x_examples_quarantine.jsonl").read_bytes().splitlines()
    ]
    assert [line["line"] for line in lines] == [41, 42, 43, 44, 45, 46]
    reasons = ["is missing", "is null", "is no text", "is empty", "NUL character", "not a JSON object"]
    assert all(line["reason"].endswith(reason) for line, reason in zip(lines, reasons, strict=True))
    text = (tmp_path / "train.jsonl").read_bytes()
    assert all(text[line["offset"] - 1 :].startswith(b"\n") for line in lines)
    cut = prepared(tmp_path, encoder, [*PAIRS, *bad, *long], overlong="cut_prompt", redo=True, **settings)
    assert (cut.train.counts.kept, cut.train.counts.cut, cut.train.counts.dropped) == (40, 3, 0)
    read, learned = segments(cut, 41)
    whole = encoder.encode("the fox " * 90 + "\n").tolist()
    assert len(read) + len(learned) == 60 + 1 and read == whole[-len(read) :] and encoder.decode(learned) == "b"
    read_lengths, learned_lengths = pair_lengths(IndexedTokens(cut.train.prefix))
    assert learned_lengths.sum() == cut.train.counts.learned_tokens
    assert read_lengths.sum() + learned_lengths.sum() == cut.train.counts.tokens


@pytest.mark.parametrize("is_encoder_decoder", [False, True])
def test_an_example_that_fills_a_row_is_kept_and_no_longer_one(
    tmp_path: Path, encoder: Encoder, is_encoder_decoder: bool
) -> None:
    """A decoder's last token is only a label: an example of 61 tokens takes 60 positions."""
    record = {"source": "the fox " * 9, "target": "b"}
    files = prepared(tmp_path, encoder, [record], is_encoder_decoder=is_encoder_decoder, length=500)
    read, learned = map(len, segments(files))
    fits = read if is_encoder_decoder else read + learned - 1
    kept = prepared(tmp_path, encoder, [record], is_encoder_decoder=is_encoder_decoder, length=fits, redo=True)
    assert (kept.train.counts.kept, kept.train.counts.cut) == (1, 0)
    lengths = packed(fits, 64 if is_encoder_decoder else fits, is_encoder_decoder)
    rows = PackedExamples(kept.train.prefix, lengths, is_encoder_decoder, encoder.pad_id)
    padding = 1 - (read + learned) / (fits + 64) if is_encoder_decoder else 0
    assert len(rows) == 1 and rows.padding_share == pytest.approx(padding)
    with pytest.raises(UserError, match=f"needs {fits} positions.*packed_length is {fits - 1}"):
        prepared(tmp_path, encoder, [record], is_encoder_decoder=is_encoder_decoder, length=fits - 1, redo=True)


def test_the_beginning_of_a_conversation_is_on_its_side(tmp_path: Path, encoder: Encoder) -> None:
    """Where each turn of a chat is a line: with all turns before it."""
    records = [conversation(f"the fox {n}", "b", "more", "c")["messages"] for n in range(60)]
    parts = [{"messages": messages[:end]} for messages in records for end in (2, 4)]
    files = prepared(tmp_path, encoder, parts, valid_fraction=0.1)
    train, valid = (files.splits[split].texts_path.read_text(encoding="utf-8") for split in ("train", "valid"))
    openings = [orjson.loads(line)["input"].partition("\n")[0] for line in valid.splitlines()]
    assert len(openings) == 2 * len({*openings}) == 12
    learned = {orjson.loads(line)["messages"][0]["content"] for line in train.splitlines()}
    assert learned.isdisjoint(openings) and len(learned) == 54


def test_cut_turns_go_with_their_answers_which_are_counted_and_told(tmp_path: Path, encoder: Encoder) -> None:
    records = [conversation("the fox " * 30, "two", "three", "four")]
    whole = prepared(tmp_path, encoder, records, length=500).train.counts
    files = prepared(tmp_path, encoder, records, length=13, overlong="cut_prompt", redo=True)
    (read, learned), counts = segments(files), files.train.counts
    assert encoder.decode(learned).strip() == "four" and len(read) + len(learned) <= 14
    assert counts.cut == 1 and whole.cut_learned_tokens == 0
    assert counts.cut_learned_tokens == whole.learned_tokens - counts.learned_tokens > 0
    rows = PackedExamples(files.train.prefix, packed(13, 13, False), False, encoder.pad_id)
    told = f"{counts.cut_learned_tokens} tokens of answers were cut away"
    assert told in str(list(task.plan_rows(files.train, None, rows)))
    only_read = prepared(
        tmp_path, encoder, records, is_encoder_decoder=True, length=9, overlong="cut_prompt", redo=True
    )
    read, _ = segments(only_read)
    assert len(read) == 9 and read[-1] == encoder.eos_id


def test_an_input_is_on_one_side_only(tmp_path: Path, encoder: Encoder) -> None:
    records = [{"source": f"fox {n % 60}" + " " * (n % 2), "target": str(n)} for n in range(180)]
    files = prepared(tmp_path, encoder, records, valid_fraction=0.1)
    assert files.train.num_examples + files.splits["valid"].num_examples == 180
    assert files.splits["valid"].num_examples == 18
    train, valid = (IndexedTokens(split.prefix) for split in (files.train, files.splits["valid"]))
    inputs = {encoder.decode(prompt_of(train.sequences(i))).strip() for i in range(train.num_documents)}
    assert not inputs & {encoder.decode(prompt_of(valid.sequences(i))).strip() for i in range(valid.num_documents)}
    other = prepared(tmp_path, encoder, records, valid_fraction=0.1, seed=99, output_prefix=str(tmp_path / "other"))
    again = prepared(tmp_path, encoder, records, valid_fraction=0.1, output_prefix=str(tmp_path / "again"))
    assert again.train.sha256 == files.train.sha256 != other.train.sha256


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.2, 0.5])
@pytest.mark.parametrize("sizes", [(20, 20), (8,) * 5, (18, 18, 4), (30, *[1] * 10), (2,) * 20, (1,) * 40])
def test_no_more_are_drawn_than_asked_for(
    sizes: tuple[int, ...], fraction: float, tmp_path: Path, encoder: Encoder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is equal among prompts; an instruction that many examples have does not go as a whole."""
    records = [{"prompt": f"fox {n}", "completion": f"{n} {m}"} for n, size in enumerate(sizes) for m in range(size)]
    files = prepared(tmp_path, encoder, records, valid_fraction=fraction)
    valid = files.splits["valid"]
    assert 1 <= valid.num_examples <= max(1, fraction * 40) and files.train.num_examples == 40 - valid.num_examples
    lines = [orjson.loads(line) for line in valid.texts_path.read_bytes().splitlines()]
    for n, size in enumerate(sizes):
        drawn, is_whole = [line for line in lines if line["input"] == f"fox {n}"], size <= min(2, max(1, fraction * 40))
        assert len(drawn) in ((0, size) if is_whole else range(size))
        assert all(line["seen"] != is_whole for line in drawn)
    assert valid.counts.seen == sum(line["seen"] for line in lines)
    assert ("have the input of an example" in capsys.readouterr().out) == bool(valid.counts.seen)


def test_seen_test_examples_are_counted(tmp_path: Path, encoder: Encoder, capsys: pytest.CaptureFixture[str]) -> None:
    test = [{"source": "unseen 1", "target": "a"}, PAIRS[3], {**PAIRS[4], "target": "b"}]
    settings = {"test_data": [write_jsonl(tmp_path / "test.jsonl", test)], "valid_fraction": 0.25}
    files = prepared(tmp_path, encoder, PAIRS, **settings)
    assert "2 of 3 test examples" in capsys.readouterr().out
    found = read_task_examples(files.splits["test"], None, 1)
    texts = [orjson.loads(line) for line in files.splits["test"].texts_path.read_bytes().splitlines()]
    assert [one["seen"] for one in texts] == [False, True, True]
    assert texts[1]["input"] == PAIRS[3]["source"] and texts[1]["place"] == f"{tmp_path / 'test.jsonl'}:2"
    assert found[1][1] == texts[1]["reference"] == PAIRS[3]["target"]
    assert found[1][0] == encoder.prompt_ids(PAIRS[3]["source"] + "\n")
    few, again, other = (read_task_examples(files.splits["valid"], 4, seed) for seed in (1, 1, 2))
    assert len(few) == 4 and few == again != other
    assert pickle.loads(pickle.dumps(ExampleFiles.read(str(tmp_path / "out" / "x")))) == files


def test_what_is_done_is_not_done_again(tmp_path: Path, encoder: Encoder, capsys: pytest.CaptureFixture[str]) -> None:
    files = prepared(tmp_path, encoder, PAIRS)
    capsys.readouterr()
    assert prepared(tmp_path, encoder, PAIRS) == files and "already" in capsys.readouterr().out
    with pytest.raises(UserError, match="overlong"):
        prepared(tmp_path, encoder, PAIRS, overlong="drop")
    with pytest.raises(UserError, match="train_data"):
        prepared(tmp_path, encoder, PAIRS[1:])
    assert prepared(tmp_path, encoder, PAIRS[1:], redo=True).train.num_examples == 39
    folder = {"train_data": [str(tmp_path)], "output_prefix": str(tmp_path / "x"), "valid_fraction": 0.25}
    first = prepared(tmp_path, encoder, output_model_dir=str(tmp_path / "run"), **folder)
    write_jsonl(tmp_path / "run" / "test_answers.jsonl", [{"reference": "a", "answer": "b"}])
    assert prepared(tmp_path, encoder, output_model_dir=str(tmp_path / "run"), **folder) == first
    with pytest.raises(UserError, match="no manifest"):
        ExampleFiles.read(str(tmp_path / "nothing"))


def test_too_many_bad_lines_by_what_is_asked_for_now(tmp_path: Path, encoder: Encoder) -> None:
    (message,) = told(tmp_path, encoder, [*PAIRS, *BAD], max_bad_fraction=0.05)
    assert "4 of 44" in message and "x_examples_quarantine.jsonl" in message and "0.091" in message
    assert (tmp_path / "out" / "x_examples_quarantine.jsonl").exists()
    Path(tmp_path / "out" / "x_quarantine.jsonl").write_text("those of step 2", encoding="utf-8")
    prepared(tmp_path, encoder, [*PAIRS, *BAD], max_bad_fraction=0.2)
    with pytest.raises(UserError, match=r"max_bad_fraction.*4 of 44 lines"):
        prepared(tmp_path, encoder, [*PAIRS, *BAD], max_bad_fraction=0.05)
    prepared(tmp_path, encoder, PAIRS, redo=True)
    assert [path.name for path in (tmp_path / "out").glob("*quarantine*")] == ["x_quarantine.jsonl"]


def test_what_the_step_writes_is_not_its_input(tmp_path: Path, encoder: Encoder) -> None:
    """Named by itself, or another name of it."""
    given = prepared(tmp_path, encoder, PAIRS, valid_fraction=0.25).splits["valid"].texts_path
    (tmp_path / "other.jsonl").hardlink_to(given)
    before, settings = given.read_bytes(), {"input_field": "input", "output_field": "reference", "redo": True}
    for name in (given, tmp_path / "other.jsonl"):
        (fault,) = refused(prepared, tmp_path, encoder, train_data=[str(name)], **settings)
        assert fault.key == "train_data" and str(name) in fault.rule and given.read_bytes() == before


def test_a_preparation_that_fails_late_leaves_nothing(tmp_path: Path, encoder: Encoder) -> None:
    """The next one would take it for somebody else's; so would it an empty file of bad lines."""
    test = [write_jsonl(tmp_path / "test.jsonl", [{"source": "a", "target": ""}])]
    assert "'target' is empty" in told(tmp_path, encoder, PAIRS, test_data=test)[0]
    assert not (tmp_path / "out").exists()


def test_validation_examples_of_before_are_gone(tmp_path: Path, encoder: Encoder) -> None:
    assert "valid" in prepared(tmp_path, encoder, PAIRS, valid_fraction=0.25).splits
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"x_valid.bin", "x_valid.idx", "x_valid_examples.jsonl"} <= left
    assert "valid" not in prepared(tmp_path, encoder, PAIRS, redo=True).splits
    assert {path.name for path in (tmp_path / "out").iterdir()} == {name for name in left if "_valid" not in name}


def test_unknown_answers_are_counted(tmp_path: Path, train_toy: TrainToy, capsys: pytest.CaptureFixture[str]) -> None:
    poor = Encoder(train_toy(vocab_size=560, byte_fallback=False))
    prepared(tmp_path, poor, [*PAIRS, {"source": "fox", "target": "ﷺ"}])
    assert "1 of 41 train answers" in capsys.readouterr().out
    compatible = Encoder(train_toy(vocab_size=560, normalization_rule_name="nfkc"))
    prepared(tmp_path / "nfkc", compatible, [*PAIRS, {"source": "fox", "target": "１"}])
    assert "1 of 41 train answers" in capsys.readouterr().out, "of which 1 is written as another character"


def test_a_prompt_that_is_cut_keeps_its_first_token_where_that_begins_every_text() -> None:
    read, learned = np.array([1, *range(10, 30)], np.int32), np.array([5, 2], np.int32)
    (cut, answer), fate = fit([read, learned], 9, "cut_prompt", False, bos_id=1)
    assert (cut.tolist(), answer.tolist(), fate) == ([1, *range(23, 30)], [5, 2], "cut")
    assert fit([read, learned], 9, "cut_prompt", False)[0][0].tolist() == [*range(22, 30)]
    turns = [read, learned, np.array([8, 20, 21], np.int32), learned]
    whole = fit([np.array([1, 6, 7], np.int32), learned, *turns[2:]], 8, "cut_prompt", False, bos_id=1)[0]
    assert [part.tolist() for part in whole] == [[1, 8, 20, 21], [5, 2]], "no half of a turn"
    for length, expected in ((5, [1, 8, 20, 21]), (4, [8, 20, 21]), (3, [1, 21])):  # where there is room, or a cut
        assert fit(turns, length, "cut_prompt", False, bos_id=1)[0][0].tolist() == expected
