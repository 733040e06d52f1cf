"""Conversations → segments of ids, read and learned in turn, by the chat template that the exported model carries.

In: messages (``{"role": "user", "content": "…"}``), a Jinja template, the run's encoder. Out: spans of text, and their
ids. The ids are those of ``AutoTokenizer.apply_chat_template`` of the exported folder: the same render function of
transformers fills the template in, and the text is cut where Hugging Face's tokenizer cuts it, at the names of control
pieces. What is learned stands in the template's ``{% generation %}`` blocks (transformers' own convention), so that no
text is searched for a marker.

*Borders.* Our encoder and Hugging Face's tokenizer encode what lies between two control pieces line by line (with a
tokenizer that step 1 did not make, as a whole). So the ids of two spans are those of the text as a whole only where the
border between them stands beside a control piece or at a line end. A template with another border is refused.

*Prompts.* The text before an answer is what ``add_generation_prompt`` gives. For an encoder-decoder, whose encoder
reads all that stands before the last answer, it ends with ``</s>``.

*Ends.* Each learned span ends with exactly one control piece, the end at which generation stops, and holds no other.

*Control pieces in messages.* Hugging Face reads the name of a control piece as that piece, also in a message. What it
does is what training does. A template can prevent it, and those of `auto_template` do: they put a space behind the
first character of each such name (``</s>`` becomes ``< /s>``), in Jinja, so that it holds wherever the template goes.

Source: transformers 5.23, `utils/chat_template_utils.py`; tokenizers 0.23, `added_vocabulary.rs`.
"""

from __future__ import annotations

import re
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zerokara.errors import Fault, UserError
from zerokara.examples import template_text
from zerokara.examples.facts import CHAT_TEMPLATE_NAME
from zerokara.tokenizer.encoder import Encoder, Ids
from zerokara.tokenizer.model_file import PieceType

Message = Mapping[str, str]
"""A turn of a conversation: ``role`` and ``content``."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBES: tuple[list[Message], ...] = (
    [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}],
    [{"role": role, "content": f"{role} {turn}"} for turn in range(2) for role in ("user", "assistant")],
)
"""Conversations on which every template is tried before any data is read."""


class BadConversation(ValueError):
    """A conversation that cannot be trained on; the message is the rule that it breaks."""


class Span(NamedTuple):
    """A part of a conversation's text."""

    text: str
    is_learned: bool


class Segment(NamedTuple):
    """The ids of a span."""

    ids: Ids
    is_learned: bool


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template and what it is filled in with; made by `auto_template` or `from_file`."""

    source: str
    """The Jinja text, as ``chat_template.jinja`` holds it."""
    where: str
    """The template's file, for messages."""
    special_tokens: Mapping[str, str]
    """``bos_token``, ``eos_token``, …, as Hugging Face hands them to templates."""


def checked(source: str, where: str, encoder: Encoder, is_encoder_decoder: bool = False) -> ChatTemplate:
    """Return the template with this Jinja text, tried on short conversations.

    Raises:
        UserError: Jinja cannot read it, it marks nothing as learned, loses text, has a border inside a line, no single
            end, or a prompt for generation that is not the beginning of what is trained on, or that does not end with
            </s> for an encoder-decoder.
    """
    if not _GENERATION.search(source):
        rule = "has no {% generation %} block, which marks what is learned"
        remedy = "write {% generation %}{{ message.content + eos_token }}{% endgeneration %} for the assistant's turns"
        raise UserError(Fault(where, rule, remedy=remedy))
    template = ChatTemplate(source, where, encoder.special_tokens)
    for messages in _PROBES:
        try:
            spans = render(template, messages)
            encode(spans, encoder)
            prompt, _ = _filled_in(template, messages[:-1], for_generation=True)
        except BadConversation as error:
            shown = "; ".join(f"{message['role']}: {message['content']}" for message in messages)
            raise UserError(Fault(where, f"{error} (tried with {shown})")) from error
        _check_prompt(prompt, spans, where)
        end = encoder.piece(encoder.eos_id)
        if is_encoder_decoder and not prompt.endswith(end):
            rule = f"must end the prompt with {end}, as every input of an encoder ends, not with {prompt[-20:]!r}"
            raise UserError(Fault(where, rule, remedy="write {{ eos_token }} before {% generation %}, and at the end"))
    return template


def _check_prompt(prompt: str, spans: Sequence[Span], where: str) -> None:
    """Check that an answer is asked for after the text after which the last one is trained."""
    last = max(i for i, span in enumerate(spans) if span.is_learned)
    trained = "".join(span.text for span in spans[:last])
    if prompt != trained:
        rule = f"asks for an answer after {prompt!r}, but trains it after {trained!r}"
        remedy = "write the same text before {% generation %} and for add_generation_prompt"
        raise UserError(Fault(where, rule, remedy=remedy))


def auto_template(encoder: Encoder, is_encoder_decoder: bool = False) -> ChatTemplate:
    """Return the template made for this tokenizer: with its turn pieces, or, where it has none, in plain text."""
    source = template_text.source_for(encoder, is_encoder_decoder)
    return checked(source, "chat_template: auto", encoder, is_encoder_decoder)


def from_file(path: str | Path, encoder: Encoder, is_encoder_decoder: bool = False) -> ChatTemplate:
    """Return the template in a Jinja file.

    Raises: UserError when there is no such file, or as `checked` does.
    """
    try:
        source = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise UserError(Fault(str(path), f"cannot be read as a chat template: {reason}")) from error
    return checked(source, str(path), encoder, is_encoder_decoder)


def of_run(run_dir: Path, encoder: Encoder, is_encoder_decoder: bool) -> ChatTemplate | None:
    """Return the template that step 7 left in a run folder; none where the model was not trained to converse.

    Raises: UserError as `from_file`.
    """
    path = run_dir / CHAT_TEMPLATE_NAME
    return from_file(path, encoder, is_encoder_decoder) if path.is_file() else None


def render(template: ChatTemplate, messages: Sequence[Message]) -> list[Span]:
    """Return the text of a conversation: read and learned spans in turn, a read one first.

    Raises:
        BadConversation: it ends without an answer, an answer is empty, the template refuses it or loses its text.
        UserError: Jinja cannot read the template.
    """
    _check_messages(messages)
    text, learned = _filled_in(template, messages)
    spans, done = list[Span](), 0
    for start, end in learned:
        spans += [Span(text[done:start], False), Span(text[start:end], True)]
        done = end
    spans += [Span(text[done:], False)] if text[done:] else []
    _check_coverage(spans, messages)
    return spans


def encode(spans: Sequence[Span], encoder: Encoder) -> list[Segment]:
    """Return the ids of each span; each learned one ends with its end.

    Raises:
        BadConversation: a border between spans stands inside a line, or a learned span has no end or several.
    """
    segments = [
        Segment(np.concatenate([np.empty(0, np.int32), *ids]), span.is_learned)
        for span, ids in zip(spans, _ids_of_spans([span.text for span in spans], encoder), strict=True)
    ]
    for segment in segments:
        if segment.is_learned:
            _check_end(segment.ids, encoder)
    return segments


def generation_prompt(template: ChatTemplate, messages: Sequence[Message], encoder: Encoder) -> Ids:
    """Return the ids after which the model answers.

    Raises: BadConversation when the template refuses the conversation.
    """
    text, _ = _filled_in(template, messages, for_generation=True)
    return np.concatenate([np.empty(0, np.int32), *next(_ids_of_spans([text], encoder))])


def end_ids(template: ChatTemplate, encoder: Encoder) -> list[int]:
    """Return the ids at which generation stops: those that end the answers, and </s>."""
    ends = {int(segment.ids[-1]) for segment in encode(render(template, _PROBES[0]), encoder) if segment.is_learned}
    return [encoder.eos_id, *sorted(ends - {encoder.eos_id})]


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise BadConversation("has no messages")
    for number, message in enumerate(messages, 1):
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise BadConversation(f"message {number} must have a role and a content, both texts")
        if message["role"] == "assistant" and not message["content"].strip():
            raise BadConversation(f"message {number}, an answer of the assistant, is empty")
    if messages[-1]["role"] != "assistant":
        raise BadConversation(f"ends with the turn of {messages[-1]['role']!r}, so that its answer is missing")


def _filled_in(
    template: ChatTemplate, messages: Sequence[Message], for_generation: bool = False
) -> tuple[str, list[tuple[int, int]]]:
    """The text, and where the learned spans start and end in it, in characters."""
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template  # a second to import

    try:
        texts, ranges = render_jinja_template(
            conversations=[[dict(message) for message in messages]],
            chat_template=template.source,
            return_assistant_tokens_mask=True,
            add_generation_prompt=for_generation,
            **template.special_tokens,
        )
    except jinja2.TemplateSyntaxError as error:
        raise UserError(Fault(f"{template.where}:{error.lineno}", f"is not Jinja: {error.message}")) from error
    except Exception as error:  # whatever an expression of the template raises
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
        if not lines:
            raise
        message = f"is refused by the chat template ({template.where}:{lines[-1]}): {error}"
        raise BadConversation(message) from error
    return texts[0], ranges[0]


def _check_coverage(spans: Sequence[Span], messages: Sequence[Message]) -> None:
    """Check that every message stands in the text, the answers in learned spans, white space aside.

    Templates may trim a message; and those of `auto_template` put spaces into the names of control pieces.
    """
    answers = [_squeezed(message["content"]) for message in messages if message["role"] == "assistant"]
    learned = [_squeezed(span.text) for span in spans if span.is_learned]
    if len(learned) != len(answers):
        count = f"{len(learned)} parts of it as learned, but it has {len(answers)} answers"
        raise BadConversation(f"the chat template marks {count} ({{% generation %}} blocks)")
    for answer, span in zip(answers, learned, strict=True):
        if answer not in span:
            raise BadConversation(
                f"the chat template loses text: {_cut(answer)!r} is not in the learned {_cut(span)!r}"
            )
    read, place = _squeezed("\n".join(span.text for span in spans if not span.is_learned)), 0
    for content in (_squeezed(message["content"]) for message in messages if message["role"] != "assistant"):
        place = read.find(content, place)
        if place < 0:
            raise BadConversation(f"the chat template loses text: {_cut(content)!r} is not in what it makes of it")
        place += len(content)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _cut(text: str) -> str:
    return text if len(text) <= 40 else text[:39] + "…"


def _check_end(ids: Ids, encoder: Encoder) -> None:
    controls = [i for i in ids.tolist() if i in encoder.control_ids]
    if not controls or ids[-1] != controls[-1]:
        wrong = f"an answer must end with a control piece, such as {encoder.piece(encoder.eos_id)}, in its"
        raise BadConversation(f"{wrong} {{% generation %}} block, else the model never learns to stop")
    if len(controls) > 1:
        names = ", ".join(map(encoder.piece, controls))
        raise BadConversation(f"an answer holds several control pieces ({names}), but only its end may be one")


@lru_cache(maxsize=4)
def _names(encoder: Encoder) -> tuple[re.Pattern[str], Mapping[str, int]]:
    """What Hugging Face's tokenizer looks for in a text (leftmost, longest), and which of it is control."""
    kinds = (PieceType.UNKNOWN, PieceType.CONTROL, PieceType.USER_DEFINED)
    found = {piece.text: i for i, piece in enumerate(encoder.model.pieces) if piece.type in kinds}
    longest_first = sorted(found, key=len, reverse=True)
    controls = {name: i for name, i in found.items() if i in encoder.control_ids or i == encoder.unk_id}
    return re.compile("|".join(map(re.escape, longest_first))), controls


def _ids_of_spans(texts: Sequence[str], encoder: Encoder) -> Iterator[list[Ids]]:
    """For each of the texts that together are one text, the ids of its parts."""
    whole, start, done = "".join(texts), 0, 0
    pattern, controls = _names(encoder)
    cuts = deque(match for match in pattern.finditer(whole) if match[0] in controls)
    for text in texts:
        end, parts = start + len(text), list[Ids]()
        while cuts and cuts[0].end() <= end:
            cut = cuts.popleft()
            parts += [_before(cut[0], whole[start : cut.start()], encoder), np.array([controls[cut[0]]], np.int32)]
            start = done = cut.end()
        if end < len(whole) and not _is_border(whole, done, end, cuts[0] if cuts else None, encoder):
            around = f"{whole[max(0, end - 20) : end]!r} | {whole[end : end + 20]!r}"
            rule = f"the chat template changes between read and learned text inside a line ({around})"
            raise BadConversation(f"{rule}, where ids cannot be cut: put a line end or a control piece there")
        yield [*parts, encoder.encode(whole[start:end])] if start < end else parts
        start = end


def _before(name: str, text: str, encoder: Encoder) -> Ids:
    """The ids of the text before a control piece; a sentinel token takes the white space before it, as exported."""
    if name.startswith("<extra_id_"):
        line_start = text.rfind("\n") + 1 if encoder.by_line else 0
        text = text[:line_start] + text[line_start:].rstrip()
    return encoder.encode(text) if text else np.empty(0, np.int32)


def _is_border(whole: str, done: int, place: int, cut: re.Match[str] | None, encoder: Encoder) -> bool:
    """Whether `place` stands beside a control piece (the last ended at `done`, `cut` is the next) or at a line end."""
    if place == done or (cut and cut.start() == place):
        return True
    inside_name = cut is not None and cut.start() < place
    return not inside_name and encoder.by_line and "\n" in whole[place - 1 : place + 1]
