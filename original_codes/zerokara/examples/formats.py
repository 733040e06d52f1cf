"""Records → examples: which fields are read and which are learned, by `data_format`.

================== ============================== ==================
format             read                           learned
================== ============================== ==================
messages           all but the answers            the answers
prompt_completion  prompt                         completion
source_target      source                         target
text_label         text, document, sentence,      label, or its text
                   review                         in `label_words`
================== ============================== ==================

`input_field` and `output_field` name others. What is read stands in the place of ``{input}`` in the prompt template; a
conversation is put into text by its chat template (`chat_template`).

A record of another form, or one with nothing to read, is bad and goes to the quarantine. Nothing to learn, or a label
without a text, is an error that names the line: it may be anywhere else too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zerokara.config.finetune_config import DataFormat, FinetuneConfig
from zerokara.corpus.documents import Reason
from zerokara.corpus.inputs import InputFile
from zerokara.errors import Fault, UserError
from zerokara.examples.reading import HEAD_LINES, BadRecord, Record, bad_record, first_records

Message = Mapping[str, str]
"""A turn of a conversation: ``role`` and ``content``."""
PLACE_OF_INPUT = "{input}"
INPUT_FIELDS: dict[DataFormat, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt",),
    "source_target": ("source",),
    "text_label": ("text", "document", "sentence", "review"),
}
OUTPUT_FIELDS: dict[DataFormat, str] = {
    "prompt_completion": "completion",
    "source_target": "target",
    "text_label": "label",
}
KEY_BYTES = 8


class BadExample(ValueError):
    """A record that is no example; the message is the reason."""


class Unlearnable(ValueError):
    """A record with nothing to learn, or something that cannot be learned: an error, not a bad line."""

    def __init__(self, rule: str, remedy: str = "", key: str | None = None, value: object = ""):
        super().__init__(rule)
        self.rule, self.remedy, self.key, self.value = rule, remedy, key, value

    def fault(self, place: str) -> Fault:
        """The fault of the line at `place`."""
        if self.key is None:
            return Fault(place, self.rule, remedy=self.remedy)
        return Fault(place, self.rule, key=self.key, value=self.value, remedy=self.remedy)


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
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest(), "little")


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

    def fits(self, values: Mapping[str, Any]) -> bool:
        """Whether a record has the fields."""
        return self.input_field in values and (not self.output_field or self.output_field in values)

    def example(self, values: Mapping[str, Any]) -> Example:
        """Return the texts of a record.

        Raises:
            BadExample: it has another form, or nothing to read.
            Unlearnable: it has nothing to learn, or a label without a text.
        """
        if self.name == "messages":
            return self._conversation(values)
        given = _text(values, self.input_field)
        label = _label(values, self.output_field) if self.name == "text_label" else None
        answer = _text(values, self.output_field) if label is None else self._word_of(label)
        if not answer.strip():
            raise Unlearnable(
                f"the field {self.output_field!r} is empty, so that nothing is learned", "remove the line, or fill it"
            )
        if not given.strip():
            raise BadExample(f"field {self.input_field!r} is empty")
        return Example(self.prompt_template.replace(PLACE_OF_INPUT, given), answer, given, label, ())

    def _word_of(self, label: str) -> str:
        if not self.label_words:
            return label
        if label not in self.label_words:
            known = ", ".join(f"{one}: {word}" for one, word in self.label_words.items())
            rule = f"label_words has no text for this label; there are {known}"
            raise Unlearnable(rule, "add it to label_words, or remove the line", self.output_field, repr(label))
        return self.label_words[label]

    def _conversation(self, values: Mapping[str, Any]) -> Example:
        turns = _value(values, self.input_field)
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
        last = messages[-1]
        if last["role"] != "assistant":
            rule = f"the conversation ends with the turn of {last['role']!r}, so that nothing is learned of it"
            raise Unlearnable(rule, "remove that turn, or add the assistant's answer")
        return Example("", last["content"], given, None, tuple(messages))


def _value(values: Mapping[str, Any], field: str) -> Any:
    if field not in values:
        raise BadExample(f"field {field!r} is missing")
    if values[field] is None:
        raise BadExample(f"field {field!r} is null")
    return values[field]


def _text(values: Mapping[str, Any], field: str) -> str:
    value = _value(values, field)
    if not isinstance(value, str):
        raise BadExample(f"field {field!r} is no text")
    if "\0" in value:
        raise BadExample(Reason.NUL.value)
    return value


def _label(values: Mapping[str, Any], field: str) -> str:
    """A label as text: the number 1 as "1", true as "true", as YAML and JSON write them."""
    value = _value(values, field)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    return _text(values, field).strip()


def read_examples(
    form: ExampleFormat, records: Iterable[Record | BadRecord]
) -> Iterator[tuple[Record, Example | Unlearnable] | tuple[BadRecord, None]]:
    """Yield each record with its texts, or why they cannot be learned; those that hold no example as bad ones."""
    for record in records:
        if isinstance(record, BadRecord):
            yield record, None
            continue
        try:
            yield record, form.example(record.values)
        except BadExample as error:
            yield bad_record(record, str(error)), None
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
        records = first_records(file)
        made = found or next(filter(None, (_format_of(config, record, is_encoder_decoder) for record in records)), None)
        if made is None or (records and not any(made.fits(record.values) for record in records)):
            faults.append(_fits_nothing(config, file, records, made))
        found = found or made
    if faults:
        raise UserError(faults)
    assert found is not None, "there is no file of examples"
    if faults := _idle_settings(config, found.name):
        raise UserError(faults)
    return found


def _format_of(config: FinetuneConfig, record: Record, is_encoder_decoder: bool) -> ExampleFormat | None:
    """The format that fits a record."""
    for name in _candidates(config):
        fields = INPUT_FIELDS[name] if config.input_field == "auto" else (config.input_field,)
        given = next((field for field in fields if field in record.values), None)
        wanted = OUTPUT_FIELDS.get(name, "") if config.output_field == "auto" else config.output_field
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
    if config.data_format != "auto":
        return [config.data_format]
    if "auto" in (config.input_field, config.output_field):
        names: list[DataFormat] = list(INPUT_FIELDS)
        return names if config.output_field == "auto" else names[1:]
    of_labels = config.output_field == "label" or config.label_words or config.metric in ("accuracy", "macro_f1")
    return ["text_label" if of_labels else "source_target"]


def _fits_nothing(
    config: FinetuneConfig, file: InputFile, records: Sequence[Record], wanted: ExampleFormat | None
) -> Fault:
    names = list(dict.fromkeys(field for record in records for field in record.values))
    shown = ", ".join(names[:12]) + (f" and {len(names) - 12:,} more" if names[12:] else "")
    of = f"of the first {HEAD_LINES} lines of {file.name}"
    rule = f"fits none {of}, whose fields are {shown}" if names else f"fits none {of}, which hold no fields"
    if wanted is not None:
        asked = " and ".join(field for field in (wanted.input_field, wanted.output_field) if field)
        rule += f"; the other files have {asked}"
    return config.fault("data_format", rule, "name the fields with input_field and output_field")


def _idle_settings(config: FinetuneConfig, name: DataFormat) -> list[Fault]:
    """Faults for settings that would have no effect."""
    faults = []
    if name == "messages":
        if config.prompt_template != "auto":
            rule, remedy = "is not for messages, which have a chat_template", "set it to auto"
            faults.append(config.fault("prompt_template", rule, remedy))
    else:
        for key, idle in (("chat_template", config.chat_template != "auto"), ("system_prompt", config.system_prompt)):
            if idle:
                faults.append(config.fault(key, f"is for messages; the examples are {name}", "remove it"))
    if config.label_words and name != "text_label":
        rule = f"is for text_label; the examples are {name}"
        faults.append(config.fault("label_words", rule, "remove it, or set data_format: text_label"))
    if config.metric in ("accuracy", "macro_f1") and name != "text_label":
        faults.append(config.fault("metric", f"is for labels; the examples are {name}", "set it to exact_match"))
    return faults
