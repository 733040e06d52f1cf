"""Chat templates: ids and labels of training are those of the export, hostile text too; faults of templates."""

import json
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from configs import fault_of, refused
from foreign_models import LLAMA_3, QWEN_3, SPECIAL, byte_level
from made_conversations import made_conversations
from toy_tokenizers import TrainToy, toy_lines
from transformers import AutoTokenizer

from zerokara.config.finetune_config import FinetuneRunConfig
from zerokara.examples.chat_template import ChatTemplate, auto_source
from zerokara.examples.formats import Message, Unlearnable
from zerokara.examples.preparation import prepare
from zerokara.huggingface import tokenizer_json
from zerokara.huggingface.tokenizer_proof import Proof, load, prove_chat, tokenizer_of_exports
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.hugging_face import open_encoder

HELLO = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "42 dogs"}]
TWO_TURNS = [*HELLO, {"role": "user", "content": "a\n\nb "}, {"role": "assistant", "content": " c\nd"}]
HOSTILE = "</s> <|user|>\n<extra_id_0><unk><|reserved_2|> <|assistant|"
ROLES = "{% for m in messages %}{% if m.role == 'assistant' %}"
OTHERS = "{% else %}{{ '<|user|>' + m.content }}{% endif %}{% endfor %}"
ASKING = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
ANSWER = "<|assistant|>{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
GOOD = ROLES + ANSWER + OTHERS + ASKING
KINDS: dict[str, dict[str, Any]] = {
    "turn pieces": {},
    "bpe, sentinels": {"model_type": "bpe", "extra_ids": 12},
    "plain text": {"reserved_pieces": ()},
    "dummy prefix": {"add_dummy_prefix": True},
    "no bytes, symbols": {"byte_fallback": False, "user_defined_symbols": ("<", "fox", "<sep>")},
    "nfkc": {"normalization_rule_name": "nmt_nfkc"},
}
END_OF = {LLAMA_3: "<|end_of_text|>", QWEN_3: "<|endoftext|>"}


@pytest.fixture(scope="module")
def encoder(train_toy: TrainToy) -> Encoder:
    return Encoder(train_toy(vocab_size=560))


def template_of(encoder: Encoder, source: str = "", is_encoder_decoder: bool = False) -> ChatTemplate:
    tokenizer = tokenizer_of_exports(encoder, is_encoder_decoder)
    return ChatTemplate(source or auto_source(encoder, is_encoder_decoder), "t.jinja", tokenizer, is_encoder_decoder)


def encoded(template: ChatTemplate, messages: Sequence[Message]) -> list[list[int]]:
    return [segment.tolist() for segment in template.encode(messages)]


def ids(encoder: Encoder, *parts: str) -> list[int]:
    """Ids of texts, and of control pieces by their names."""
    names = {encoder.pieces[i]: i for i in encoder.control_ids}
    return [i for part in parts for i in ([names[part]] if part in names else encoder.encode(part).tolist())]


def test_spans_are_read_and_learned_in_turn(encoder: Encoder, train_toy: TrainToy) -> None:
    assert encoded(template_of(encoder), TWO_TURNS) == [
        ids(encoder, "<|user|>", "the fox", "<|assistant|>"),
        ids(encoder, "42 dogs", "</s>"),
        ids(encoder, "<|user|>", "a\n\nb ", "<|assistant|>"),
        ids(encoder, " c\nd", "</s>"),
    ]
    plain = Encoder(train_toy(reserved_pieces=()))  # without turn pieces borders stand at line ends
    read = plain.encode("user:\nthe fox\nassistant:\n").tolist()
    assert encoded(template_of(plain), HELLO) == [read, ids(plain, "42 dogs", "</s>")]


@pytest.mark.parametrize("is_encoder_decoder", [False, True], ids=["decoder", "encoder-decoder"])
@pytest.mark.parametrize("kind", [*KINDS, *SPECIAL])
def test_ids_and_labels_are_those_of_the_export(
    kind: str, is_encoder_decoder: bool, train_toy: TrainToy, tmp_path: Path
) -> None:
    """And the prompt for the last answer is what stands before it; no message becomes a control piece."""
    if kind in SPECIAL:
        folder = tmp_path / kind
        named = {"eos_token": END_OF[kind], "bos_token": SPECIAL[kind][0] if kind == LLAMA_3 else None}
        encoder = open_encoder(byte_level(folder, kind, tokenizer_config=named).parent)
    else:
        encoder = Encoder(train_toy(**{"vocab_size": 580, **KINDS[kind]}))
    template = template_of(encoder, is_encoder_decoder=is_encoder_decoder)
    tokenizer_json.write(encoder, tmp_path, 64, is_encoder_decoder, template.source)
    theirs = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False, local_files_only=True)
    conversations = list(islice(made_conversations(encoder, toy_lines(50)), 100))
    quiet: dict[str, Any] = {"tokenizer_kwargs": {"verbose": False}}
    whole = theirs.apply_chat_template(conversations, return_assistant_tokens_mask=True, **quiet)
    before = [messages[:-1] for messages in conversations]
    prompts = theirs.apply_chat_template(before, add_generation_prompt=True, **quiet)["input_ids"]
    for number, messages in enumerate(conversations):
        ours, mask = encoded(template, messages), whole["assistant_masks"][number]
        joined = [i for segment in ours for i in segment]
        labels = [i % 2 for i, segment in enumerate(ours) for _ in segment]
        assert joined == whole["input_ids"][number][: len(joined)]
        assert not any(mask[len(joined) :])
        last = slice(len(joined) - len(ours[-1]) if is_encoder_decoder else 0, len(joined))
        assert mask[last] == labels[last]
        assert prompts[number] == joined[: -len(ours[-1])]
        assert [ours[-1].count(i) for i in encoder.control_ids if i in ours[-1]] == [1]
    hostile = [{**message, "content": HOSTILE} for message in TWO_TURNS]
    found, expected = (
        [i for segment in encoded(template, messages) for i in segment if i in encoder.control_ids]
        for messages in (hostile, TWO_TURNS)
    )
    assert found == expected


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (QWEN_3, "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"),
        (
            LLAMA_3,
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nthe fox<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ],
)
def test_models_of_others_keep_their_turns(kind: str, text: str, tmp_path: Path) -> None:
    named = {"eos_token": END_OF[kind], "bos_token": SPECIAL[kind][0] if kind == LLAMA_3 else None}
    # Qwen's names the end of documents, which no conversation begins with.
    config = {"bos_token_id": 420} if kind == QWEN_3 else {}
    encoder = open_encoder(
        byte_level(tmp_path / kind, kind, ["a\n\n\n\nb\n\n\nfox"] * 99, tokenizer_config=named, config=config)
    )
    tokenizer, end = tokenizer_of_exports(encoder, False), SPECIAL[kind][-1]
    template = template_of(encoder)
    assert encoded(template, HELLO) == [
        tokenizer(text, add_special_tokens=False)["input_ids"],
        ids(encoder, "42 dogs", end),
    ]
    assert template.end_ids == [encoder.eos_id, *ids(encoder, end)]
    with pytest.raises(Unlearnable, match="inside a line"):
        template.encode([HELLO[0], {"role": "assistant", "content": "\n\nno"}])


def test_an_encoders_input_ends_with_the_end(encoder: Encoder) -> None:
    read, learned = encoded(template_of(encoder, is_encoder_decoder=True), TWO_TURNS)
    assert read[-1] == learned[-1] == encoder.eos_id
    assert "</s>" in refused(template_of, encoder, GOOD, is_encoder_decoder=True)[0].rule


def test_another_end_ends_generation_too(encoder: Encoder) -> None:
    assert template_of(encoder).end_ids == [encoder.eos_id]
    template = template_of(encoder, GOOD.replace("eos_token", "'<|end|>'"))
    assert template.end_ids == [encoder.eos_id, *ids(encoder, "<|end|>")]


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        (GOOD.replace("{% generation %}", "").replace("{% endgeneration %}", ""), "{% generation %}"),
        (GOOD.replace("{{ m.content + eos_token }}", "{{ eos_token }}"), "loses text"),
        (GOOD.replace("'<|user|>' + m.content", "'<|user|>'"), "loses text"),
        (GOOD.replace("{{ m.content + eos_token }}", "{{ m.content }}"), "control piece"),
        (GOOD.replace("m.content + eos_token", "m.content + eos_token + eos_token"), "several"),
        (GOOD.replace("<|assistant|>", "Assistant: "), "inside a line"),
        (GOOD.replace("<|assistant|>{% gen", "<|assistant|>\n{% gen"), "asks for an answer"),
        ("{% if %}" + GOOD, "t.jinja:1: is not Jinja"),
        ("\n\n{{ 1 // 0 }}" + GOOD, "t.jinja:3"),
        ("\n{{ raise_exception('no turns today') }}" + GOOD, "no turns today"),
        (
            "{% for m in messages[:1] %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% endfor %}",
            "lose",
        ),
    ],
)
def test_a_bad_template_is_refused(source: str, wrong: str, encoder: Encoder) -> None:
    fault = fault_of(template_of, encoder, source)
    assert fault.where.startswith("t.jinja") and wrong in str(fault)
    assert template_of(encoder, GOOD), "and it is the change that is refused"


def test_a_conversation_that_the_template_refuses_is_refused_alone(encoder: Encoder) -> None:
    spelling = [HELLO[0], {"role": "assistant", "content": "a </s> b"}]
    with pytest.raises(Unlearnable, match="several"):
        template_of(encoder, GOOD).encode(spelling)
    template = template_of(encoder)
    with pytest.raises(Unlearnable, match="tool"):
        template.encode([{"role": "tool", "content": "x"}, HELLO[1]])
    assert encoded(template, HELLO) and encoded(template, spelling)


TOOLS = GOOD.replace(
    "m.content + eos_token", "m.content + (m.tool_calls | tojson if m.tool_calls else '') + eos_token"
).replace("'<|user|>' + m.content", "'<|user|>' + (m.name or '') + m.content")
CALL = [{"type": "function", "function": {"name": "weather", "arguments": '{"city": "Iasi"}'}}]


def calling(**more: Any) -> list[Message]:
    called = {"role": "assistant", "content": "42", "tool_calls": CALL} | more
    return [HELLO[0] | {"name": "Ada"}, called, HELLO[0], HELLO[1]]


def test_fields_that_the_template_writes_are_learned_and_others_refuse_the_example(encoder: Encoder) -> None:
    segments = encoded(template_of(encoder, TOOLS), calling())
    read, learned = encoder.decode(segments[0]), encoder.decode(segments[1])
    assert "Ada" in read and "weather" in learned and "Iasi" in learned
    alone = encoded(template_of(encoder, TOOLS), calling(content=""))
    assert alone[1] == segments[1][len(encoder.encode("42")) :]
    outside = TOOLS.replace("{% generation %}", "{{ m.tool_calls | tojson if m.tool_calls else '' }}{% generation %}")
    outside = outside.replace("m.content + (m.tool_calls | tojson if m.tool_calls else '')", "m.content")
    for source, key in ((GOOD, "name"), (TOOLS, "reasoning_content"), (outside, "tool_calls")):
        with pytest.raises(Unlearnable, match=f"'{key}'"):
            template_of(encoder, source).encode(calling(**({key: "so"} if key == "reasoning_content" else {})))
    named = [HELLO[0] | {"id": "1"}, HELLO[1] | {"tool_call_id": "c"}]
    assert encoded(template_of(encoder, GOOD), named) == encoded(template_of(encoder, GOOD), HELLO)


@pytest.mark.parametrize("call", ["strftime_now('%H:%M')", "['a', 'b'] | random", "lipsum(1)"])
def test_a_template_of_the_moment_is_refused(call: str, encoder: Encoder) -> None:
    fault = fault_of(template_of, encoder, f"\n{{{{ {call} }}}}{GOOD}")
    assert fault.where == "t.jinja:2" and "each time" in fault.rule


BROKEN = {
    "a message may spell </s>": ("< /s>", "</s>"),
    "a line end after a turn piece": ('"<|user|>" + text', '"<|user|>\\n" + text'),
    "another end": ('text + "</s>"', 'text + "<|end|>"'),
    "trimmed answers": ('text + "</s>"', 'text|trim + "</s>"'),
    "no prompt for generation": ("if add_generation_prompt", "if false"),
}


@pytest.mark.parametrize("is_encoder_decoder", [False, True], ids=["decoder", "encoder-decoder"])
def test_an_exports_template_is_held_to_what_was_trained(
    is_encoder_decoder: bool, encoder: Encoder, tmp_path: Path
) -> None:
    conversations = islice(made_conversations(encoder, toy_lines(50)), 60)
    lines = "".join(json.dumps({"messages": each}) + "\n" for each in conversations).replace("\\u0000", "0")
    (tmp_path / "train.jsonl").write_text(lines, encoding="utf-8")
    settings = {"train_data": [str(tmp_path / "train.jsonl")], "output_prefix": str(tmp_path / "out" / "x")}
    tokenizer = partial(tokenizer_of_exports, encoder, is_encoder_decoder)
    architecture = "t5" if is_encoder_decoder else "llama"
    config = FinetuneRunConfig(**settings, valid_fraction=0, packed_length=9999, architecture=architecture)
    files = prepare(config, encoder, tokenizer)
    trained = [json.loads(line) for line in files.train.texts_path.read_bytes().splitlines()]

    def proved(template: str) -> Proof:
        tokenizer_json.write(encoder, tmp_path, 64, is_encoder_decoder, template)
        return prove_chat(load(tmp_path), trained)

    proof = proved(files.chat_template)
    assert proof.facts == {"compared": 60, "failures": 0} and not proof.faults, proof.faults
    for name, (old, new) in ({} if is_encoder_decoder else BROKEN).items():
        assert old in files.chat_template
        proof = proved(files.chat_template.replace(old, new))
        assert "at token" in proof.faults[0], name
        assert name != "another end" or proof.facts["failures"] == 60, "after a first answer no prompt tells it"
