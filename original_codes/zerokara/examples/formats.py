"""Records → examples: which fields are read and which are learned, by `data_format` (`FIELDS`).

What is read stands in the place of ``{input}`` in the prompt template; a conversation is put into text by its chat
template (`encoding`). A record of another form, or one with nothing to read, is bad and goes to the quarantine. Nothing
to learn, or a label without a text, is an error that names the line: it may be anywhere else too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from zerokara.config.finetune_config import DataFormat, FinetuneConfig
from zerokara.corpus.documents import Reason
from zerokara.corpus.find import InputFile
from zerokara.errors import Fault, UserError
from zerokara.examples.reading import Record, read_records

Message = Mapping[str, str]
"""A turn of a conversation: ``role`` and ``content``."""
HEAD_LINES = 50
"""Records of a file that show whether a format fits it."""
PLACE_OF_INPUT = "{input}"
FIELDS: dict[DataFormat, tuple[tuple[str, ...], str]] = {
    "messages": (("messages",), ""),
    "prompt_completion": (("prompt",), "completion"),
    "source_target": (("source",), "target"),
    "text_label": (("text", "document", "sentence", "review"), "label"),
}
"""The field that is read, one of these, and the field that is learned, of a label its text in `label_words`; of
messages all but the answers are read. `input_field` and `output_field` name others."""


class BadExample(ValueError):
    """A record that is no example; the message is the reason."""


class Unlearnable(ValueError):
    """A record with nothing to learn, or something that cannot be learned: an error, not a bad line."""

    def __init__(self, rule: str, remedy: str = "", **subject: Any):
        """`subject` may hold the `key` and the `value` at fault."""
        super().__init__(rule)
        self.fault = Fault("", rule, remedy=remedy, **subject)
        """Of a line whose place is for the caller to name."""


class Example(NamedTuple):
    """The texts of one example."""

    prompt: str
    """What is read, in its template; empty for a conversation."""
    answer: str
    """What is learned, without the end; of a conversation the last answer."""
    input: str
    """What is read, as the record has it; of a conversation the turns but for the answers, one after the other."""
    label: str | None
    messages: tuple[Message, ...]
    """The turns of a conversation."""

    @property
    def key(self) -> int:
        """A hash of what is read, by which two examples are known as one text."""
        text = " ".join(self.input.split())
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class ExampleFormat:
    """How the records of a run become examples."""

    name: DataFormat
    input_field: str
    output_field: str
    """Empty for messages."""
    prompt_template: str
    """With `PLACE_OF_INPUT` in it; empty for messages."""
    label_words: Mapping[str, str]
    system_prompt: str = ""

    def example(self, values: Mapping[str, Any]) -> Example:
        """Return the texts of a record.

        Raises:
            BadExample: it has another form, or nothing to read.
            Unlearnable: it has nothing to learn, or a label without a text.
        """
        if self.name == "messages":
            return self._conversation(values)
        given = _text(values, self.input_field)
        answer, label = _text(values, self.output_field, may_be_number=self.name == "text_label"), None
        if self.name == "text_label":
            label = answer.strip()
            if self.label_words and label not in self.label_words:
                known = ", ".join(f"{one}: {word}" for one, word in self.label_words.items())
                rule = f"label_words has no text for this label; there are {known}"
                raise Unlearnable(rule, "add it, or remove the line", key=self.output_field, value=repr(label))
            answer = self.label_words.get(label, label)
        if not answer.strip():
            rule = f"the field {self.output_field!r} is empty, so that nothing is learned"
            raise Unlearnable(rule, "remove the line, or fill it")
        if not given.strip():
            raise BadExample(f"field {self.input_field!r} is empty")
        return Example(self.prompt_template.replace(PLACE_OF_INPUT, given), answer, given, label, ())

    def _conversation(self, values: Mapping[str, Any]) -> Example:
        turns = values.get(self.input_field)
        if not isinstance(turns, list) or not turns:
            raise BadExample(f"field {self.input_field!r} is no list of messages")
        messages: list[Message] = []
        for number, turn in enumerate(turns, 1):
            if not isinstance(turn, dict) or not all(isinstance(turn.get(key), str) for key in ("role", "content")):
                raise BadExample(f"message {number} lacks a role or a content that is text")
            if "\0" in turn["content"]:
                raise BadExample(Reason.NUL.value)
            messages.append({"role": turn["role"], "content": turn["content"]})
        if self.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        given = "\n".join(message["content"] for message in messages if message["role"] != "assistant")
        if any(message["role"] == "assistant" and not message["content"].strip() for message in messages):
            raise Unlearnable("an answer of the assistant is empty", "remove the line, or fill it")
        if messages[-1]["role"] != "assistant":
            rule = f"the conversation ends with the turn of {messages[-1]['role']!r}, so that nothing is learned of it"
            raise Unlearnable(rule, "remove that turn, or add the assistant's answer")
        return Example("", messages[-1]["content"], given, None, tuple(messages))


def _text(values: Mapping[str, Any], field: str, may_be_number: bool = False) -> str:
    """The text of a field; a number or truth value, where that may be, as JSON writes it."""
    if field not in values:
        raise BadExample(f"field {field!r} is missing")
    value = values[field]
    if may_be_number and isinstance(value, bool | int | float):
        return json.dumps(value)
    if not isinstance(value, str):
        raise BadExample(f"field {field!r} is null" if value is None else f"field {field!r} is no text")
    if "\0" in value:
        raise BadExample(Reason.NUL.value)
    return value


Found = tuple[Record, Example | Unlearnable | None]
"""A record with its texts, or why they cannot be learned, or None where it is bad."""


def read_examples(form: ExampleFormat, records: Iterable[Record]) -> Iterator[Found]:
    """Yield what each record holds."""
    for record in records:
        try:
            yield record, None if record.reason else form.example(record.values)
        except BadExample as error:
            yield record.bad(str(error)), None
        except Unlearnable as error:
            yield record, error


def resolve(config: FinetuneConfig, files: Sequence[InputFile], is_encoder_decoder: bool) -> ExampleFormat:
    """Find the format of the files by the fields of their first lines; the first file decides for all.

    Raises:
        UserError: no line of a file fits, with the fields found; or a setting that the format has no use for.
    """
    found: ExampleFormat | None = None
    faults: list[Fault] = []
    for file in files:
        records = list(islice((each for each in read_records(file) if not each.reason), HEAD_LINES))
        made = found or next(filter(None, (_format_of(config, record, is_encoder_decoder) for record in records)), None)
        wanted = {made.input_field, made.output_field or made.input_field} if made else set()
        if made is None or (records and not any(wanted <= record.values.keys() for record in records)):
            faults.append(_fits_nothing(config, file, records, made))
        found = found or made
    if faults or found is None:
        raise UserError(faults)
    if faults := _idle_settings(config, found.name):
        raise UserError(faults)
    return found


def _format_of(config: FinetuneConfig, record: Record, is_encoder_decoder: bool) -> ExampleFormat | None:
    """The format that fits a record."""
    for name in _candidates(config):
        inputs, output = FIELDS[name]
        fields = inputs if config.input_field == "auto" else (config.input_field,)
        given = next((field for field in fields if field in record.values), None)
        wanted = output if config.output_field == "auto" else config.output_field
        if given is None or (name != "messages" and wanted not in record.values):
            continue
        if name == "messages":
            if config.data_format == "auto" and not isinstance(record.values[given], list):
                continue
            return ExampleFormat(name, given, "", "", dict(config.label_words), config.system_prompt)
        template = config.prompt_template
        if template == "auto":
            template = PLACE_OF_INPUT if is_encoder_decoder else PLACE_OF_INPUT + "\n"
        return ExampleFormat(name, given, wanted, template, dict(config.label_words))
    return None


def _candidates(config: FinetuneConfig) -> list[DataFormat]:
    names: list[DataFormat] = [*FIELDS] if config.data_format == "auto" else [config.data_format]
    if config.data_format != "auto" or config.output_field == "auto":
        return names
    if config.input_field == "auto":
        return names[1:]
    of_labels = config.output_field == "label" or config.label_words or config.metric in ("accuracy", "macro_f1")
    return ["text_label" if of_labels else "source_target"]


def _fits_nothing(
    config: FinetuneConfig, file: InputFile, records: Sequence[Record], wanted: ExampleFormat | None
) -> Fault:
    names = list(dict.fromkeys(field for record in records for field in record.values))
    shown = ", ".join(names[:12]) + (f" and {len(names) - 12:,} more" if names[12:] else "")
    have = f"whose fields are {shown}" if names else "which hold no fields"
    rule = f"fits none of the first {HEAD_LINES} lines of {file.name}, {have}"
    if wanted is not None:
        asked = " and ".join(field for field in (wanted.input_field, wanted.output_field) if field)
        rule += f"; the other files have {asked}"
    return config.fault("data_format", rule, "name the fields with input_field and output_field")


def _idle_settings(config: FinetuneConfig, name: DataFormat) -> list[Fault]:
    """Faults for settings that would have no effect."""
    is_chat, is_labels = name == "messages", name == "text_label"
    uses = (
        ("prompt_template", config.prompt_template != "auto", not is_chat, "set it to auto: there is a chat_template"),
        ("chat_template", config.chat_template != "auto", is_chat, "remove it"),
        ("system_prompt", bool(config.system_prompt), is_chat, "remove it"),
        ("label_words", bool(config.label_words), is_labels, "remove it, or set data_format: text_label"),
        ("metric", config.metric in ("accuracy", "macro_f1"), is_labels, "set it to exact_match"),
    )
    return [
        config.fault(key, f"is not for these examples, which are {name}", remedy)
        for key, is_set, is_used, remedy in uses
        if is_set and not is_used
    ]
