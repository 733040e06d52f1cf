"""Files of examples → records (the fields of a line) → examples: which fields are read, and which are learned.

*Files*, by name: ``.jsonl``, ``.json``, ``.ndjson`` (one JSON object a line); ``.tsv`` and ``.txt`` (values between
tabs, the first line names them); each plain, ``.gz`` or ``.zst``; ``.parquet``. In a .tsv every character but tab and
line end is plain: quotes too (pandas' ``quoting=3``), and a backslash. Lines are read as those of a corpus
(`corpus.read`): a byte order mark and CRLF are tolerated; a line that is not UTF-8, has a NUL or is too long is bad.
Blank lines are no records. A damaged file is an error: of a few examples none may be missing.

*Examples*, by `data_format` (`FIELDS`): the input stands in the place of ``{input}`` in the prompt template; a
conversation is put into text by its chat template (`encoding`). A record of another form, or with an empty input, is
bad and goes to the quarantine. An empty answer, or a label without a text, is an error that names the line: it may be
anywhere else too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from zerokara.base.errors import Fault, UserError, refuse, shown
from zerokara.base.progress import first_of, plural
from zerokara.config.finetune_config import DataFormat, FinetuneConfig
from zerokara.config.settings import whole
from zerokara.corpus.documents import HARMLESS, BadLine, Reason, excerpt, object_of_line
from zerokara.corpus.find import InputFile
from zerokara.corpus.read import Range, read, total_plain_bytes
from zerokara.corpus.token_hashes import composed
from zerokara.examples.facts import PLACE_OF_INPUT

Message = Mapping[str, Any]
"""A turn of a conversation: ``role``, ``content``, ``weight`` where it is 0, and what else the chat template reads."""
HEAD_LINES = 50
"""Records at the head of a file by which its format is found."""
NAMED_FIELDS = 12
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_CHANGING = ("weight", "tools", "functions", "images", "videos", "audios", "system", "history", "rejected", "kto_tag")
"""Fields of other programs beside a conversation or a completion, which change what is learned of it."""
FIELDS: dict[DataFormat, tuple[tuple[str, ...], str]] = {
    "messages": (("messages",), ""),
    "prompt_completion": (("prompt",), "completion"),
    "source_target": (("source",), "target"),
    "text_label": (("text", "document", "sentence", "review"), "label"),
}
"""The input, one of these fields, and the output, a label's by its text in `label_words`; of messages the answers are
the output. `input_field` and `output_field` name others."""


class Record(NamedTuple):
    """Fields of one line, or the reason why it holds none."""

    file: InputFile
    line: int
    """Number from 1 of the line in the file, or of the row in a .parquet."""
    offset: int
    """Byte at which the line starts, in the (unpacked) file; the index of the row, in a .parquet."""
    values: dict[str, Any]
    reason: str = ""
    """Reason why it is bad; empty for a good one."""
    excerpt: str = ""

    @property
    def place(self) -> str:
        """``file:line``, for messages."""
        return f"{self.file.name}:{self.line}"

    def bad(self, reason: str, text: str | None = None) -> Record:
        """This record as a bad line; its text is made of the values where none is given."""
        content = "\t".join(map(str, self.values.values())) if text is None else text
        return self._replace(reason=reason, excerpt=excerpt(content.encode("utf-8", "backslashreplace")))


def read_records(file: InputFile, advance: Callable[[float], object] = lambda amount: None) -> Iterator[Record]:
    """Iterate over the records and bad lines of a file; `advance` gets about the bytes on disk of each.

    Raises:
        UserError: the file is damaged, or the first line of a table names no columns or cannot be read; names the file.
        OSError: the disk or the network fails.
    """
    return _rows(file, advance) if file.format == "parquet" else _lines(file, advance)


def _lines(file: InputFile, advance: Callable[[float], object]) -> Iterator[Record]:
    names, share_on_disk = list[str](), file.bytes / max(1, total_plain_bytes([file]))
    values: dict[str, Any] | str
    for item in read(Range(replace(file, format="txt")), txt_document="line"):
        advance(item.bytes * share_on_disk)
        record = Record(file, item.line, item.offset, {})
        if isinstance(item, BadLine):
            if item.reason is Reason.DAMAGED:
                raise _damaged(file, item.excerpt)
            if item.reason in HARMLESS:
                continue
            if file.format != "jsonl" and not names:  # the next line would be taken for them
                rule = f"the first line, which names the columns, cannot be read: {item.reason.value}"
                remedy = "save the file as UTF-8 (iconv -f EUC-KR -t UTF-8, for one in EUC-KR), or mend the line"
                raise UserError(Fault(record.place, rule, value=shown(item.excerpt), remedy=remedy))
            yield record._replace(reason=item.reason.value, excerpt=item.excerpt)
            continue
        if file.format == "jsonl":
            values = object_of_line(item.text)
        elif not names:
            names = _column_names(item.text, record.place)
            continue
        elif len(cells := item.text.split("\t")) == len(names):
            values = dict(zip(names, cells, strict=True))
        else:
            values = f"{plural(len(cells), 'column')} instead of {len(names)}"
        yield record.bad(str(values), item.text) if isinstance(values, str) else record._replace(values=values)


def _column_names(line: str, where: str) -> list[str]:
    names = [cell.strip() for cell in line.split("\t")]
    if len(names) < 2:
        rule = "the first line has no tab; that of a .tsv or .txt names the columns, with tabs between them"
        raise UserError(Fault(where, rule, value=shown(excerpt(line.encode())), remedy="add it, or use .jsonl"))
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(Fault(where, f"the first line names the column {twice[0]!r} twice", remedy="rename one"))
    return names


def _rows(file: InputFile, advance: Callable[[float], object]) -> Iterator[Record]:
    from zerokara.corpus import tables  # pyarrow: only where there is such a file

    number = 0
    try:
        with tables.opened(file) as table, tables.damage():
            for batch in table.iter_batches(128, use_threads=False):
                for row in zip(*batch.columns, strict=True):
                    number += 1
                    record = Record(file, number, number - 1, {})
                    try:
                        values = [cell.as_py() for cell in row]
                        yield record._replace(values=dict(zip(batch.schema.names, values, strict=True)))
                    except UnicodeDecodeError:
                        yield record._replace(reason=Reason.INVALID_UTF8.value)
    except tables.Damaged as damage:
        raise _damaged(file, str(damage)) from damage
    advance(file.bytes)


def _damaged(file: InputFile, why: str) -> UserError:
    return UserError(Fault(file.name, f"is damaged: {why}", remedy="copy or download it again"))


class BadExample(ValueError):
    """A record that is no example; the message is the reason."""


class Unlearnable(ValueError):
    """A record with nothing to learn, or something that cannot be learned: an error, not a bad line."""

    def __init__(self, rule: str, remedy: str = "", **subject: Any):
        """`subject` may hold the `key` and the `value` at fault."""
        super().__init__(rule)
        self.fault = Fault("", rule, remedy=remedy, **subject)
        """Fault of a line, whose place the caller names."""


class Example(NamedTuple):
    prompt: str
    """Input in its template; empty for a conversation."""
    answer: str
    """Learned text, without the end; of a conversation the last answer."""
    input: str
    """Input as the record has it; of a conversation the turns but for the answers, one after the other."""
    label: str | None
    messages: tuple[Message, ...]

    @property
    def keys(self) -> tuple[int, int, int]:
        """Hashes of the opening, of input and answer, and of the input.

        The opening of a conversation is the user's first turn, since one may be the beginning of another; else it is
        the input. White space, and whether Unicode is composed, make no difference.
        """
        opening = next((turn["content"] for turn in self.messages if turn["role"] == "user"), self.input)
        content = opening, f"{self.input} \0 {self.answer}", self.input
        texts = (" ".join(composed(text).split()).encode() for text in content)
        first, both, whole = (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") for text in texts)
        return first, both, whole


@dataclass(frozen=True)
class ExampleFormat:
    """Fields, template and labels that make records into examples."""

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
            BadExample: it has another form, or an empty input.
            Unlearnable: it has an empty answer, or a label without a text.
        """
        for field in _CHANGING if self.name in ("messages", "prompt_completion") else ():
            if field not in (self.input_field, self.output_field) and values.get(field) not in (*_EMPTY, 1):
                raise BadExample(f"the field {field!r}, which changes what is learned, is not supported")
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
        messages = [_message(turn, f"message {number}") for number, turn in enumerate(turns, 1)]
        if messages[-1].get("weight") == 0:  # nobody reads what follows the last answer that is learned
            is_learned = [turn["role"] == "assistant" and "weight" not in turn for turn in messages]
            messages = messages[: len(messages) - is_learned[::-1].index(True)] if any(is_learned) else []
        if not messages:
            raise BadExample("every answer has weight 0, so that nothing is learned")
        messages = with_system(messages, self.system_prompt)
        given = "\n".join(message["content"] for message in messages if message["role"] != "assistant")
        if any(turn["role"] == "assistant" and not (turn["content"].strip() or extra_keys(turn)) for turn in messages):
            raise Unlearnable("an answer of the assistant is empty", "remove the line, or fill it")
        if messages[-1]["role"] != "assistant":
            rule = f"the conversation ends with the turn of {messages[-1]['role']!r}, so that nothing is learned of it"
            raise Unlearnable(rule, "remove that turn, or add the assistant's answer")
        return Example("", messages[-1]["content"], given, None, tuple(messages))


def _message(turn: Any, what: str) -> Message:
    """The fields of a turn that are not empty, in which only a weight of 0, of an answer, stands."""
    fields = turn if isinstance(turn, dict) else {}
    given = {key: value for key, value in fields.items() if value not in _EMPTY or (key, value) == ("content", "")}
    message = {"content": ""} | given if extra_keys(given) else given
    if not all(isinstance(message.get(key), str) for key in ("role", "content")):
        raise BadExample(f"{what} lacks a role or a content that is text; it has {', '.join(map(str, given))}")
    if "\0" in message["content"]:
        raise BadExample(Reason.NUL.value)
    if (weight := message.pop("weight", 1)) not in (0, 1):
        raise BadExample(f"{what} has weight {weight!r}, which can only be 0 or 1")
    return message if weight or message["role"] != "assistant" else message | {"weight": 0}


def with_system(messages: list[Message], text: str) -> list[Message]:
    """A conversation with a system message of this text, unless that is empty or it has one."""
    return [{"role": "system", "content": text}, *messages] if text and messages[0]["role"] != "system" else messages


def auto_template(is_encoder_decoder: bool) -> str:
    """Prompt template of `auto`: a decoder reads an input on a line of its own."""
    return PLACE_OF_INPUT if is_encoder_decoder else PLACE_OF_INPUT + "\n"


def extra_keys(message: Message) -> list[str]:
    """Fields of a message that have an effect only where the chat template reads them."""
    return [key for key in message if key not in ("role", "content", "weight", "id", "tool_call_id")]


def _text(values: Mapping[str, Any], field: str, may_be_number: bool = False) -> str:
    """The text of a field; a number or truth value, where that may be, as JSON has it, and 1.0 as 1."""
    if field not in values:
        raise BadExample(f"field {field!r} is missing")
    value = values[field]
    if may_be_number and isinstance(value, bool | int | float):
        return json.dumps(whole(value))
    if not isinstance(value, str):
        raise BadExample(f"field {field!r} is null" if value is None else f"field {field!r} is no text")
    if "\0" in value:
        raise BadExample(Reason.NUL.value)
    return value


Found = tuple[Record, Example | Unlearnable | None]
"""A record with its example, or why that cannot be learned, or None for a bad record."""


def read_examples(form: ExampleFormat, records: Iterable[Record]) -> Iterator[Found]:
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
        form = found or next(filter(None, (_format_of(config, record, is_encoder_decoder) for record in records)), None)
        wanted = {form.input_field, form.output_field} - {""} if form else set()
        if form is None or (records and not any(wanted <= record.values.keys() for record in records)):
            names = first_of(list(dict.fromkeys(field for record in records for field in record.values)), NAMED_FIELDS)
            rule = f"fits none of the first {HEAD_LINES} lines of {file.name}, whose fields are: {names or 'none'}"
            remedy = "name the fields with input_field and output_field, which all files have"
            faults.append(config.fault("data_format", rule, remedy))
        found = found or form
    if faults or found is None:
        raise UserError(faults)
    is_chat, is_labels = found.name == "messages", found.name == "text_label"
    uses = (
        ("prompt_template", config.prompt_template != "auto", not is_chat, "set it to auto: there is a chat_template"),
        ("chat_template", config.chat_template != "auto", is_chat, "remove it"),
        ("system_prompt", bool(config.system_prompt), is_chat, "remove it"),
        ("label_words", bool(config.label_words), is_labels, "remove it, or set data_format: text_label"),
        ("metric", config.metric in ("accuracy", "macro_f1"), is_labels, "set exact_match or data_format: text_label"),
    )
    for key, is_set, has_effect, remedy in uses:
        if is_set and not has_effect:
            faults.append(config.fault(key, f"is not for these examples, which are {found.name}", remedy))
    refuse(faults)
    return found


def _format_of(config: FinetuneConfig, record: Record, is_encoder_decoder: bool) -> ExampleFormat | None:
    of_labels = config.output_field == "label" or config.label_words or config.metric in ("accuracy", "macro_f1")
    of_named_fields = "text_label" if of_labels else "source_target"
    for name, (inputs, output) in FIELDS.items():
        is_other = name == "messages" or (config.input_field != "auto" and name != of_named_fields)
        if config.data_format not in ("auto", name):
            continue
        if config.data_format == "auto" and config.output_field != "auto" and is_other:
            continue
        fields = inputs if config.input_field == "auto" else (config.input_field,)
        given = next((field for field in fields if field in record.values), None)
        wanted = output if config.output_field == "auto" else config.output_field
        if given is None or (name != "messages" and wanted not in record.values):
            continue
        if name == "messages":
            if config.data_format == "auto" and not isinstance(record.values[given], list):
                continue
            return ExampleFormat(name, given, "", "", dict(config.label_words), config.system_prompt)
        template = auto_template(is_encoder_decoder) if config.prompt_template == "auto" else config.prompt_template
        return ExampleFormat(name, given, wanted, template, dict(config.label_words))
    return None
