"""Conversations → ids, read and learned in turn, by the chat template and the tokenizer that an export carries.

In: messages (``{"role": "user", "content": "…"}``), a Jinja template, the tokenizer as `AutoTokenizer` loads it from an
export. Out: segments of ids. Text and ids are those of ``tokenizer.apply_chat_template``: the same render function of
transformers fills the template in and says where its ``{% generation %}`` blocks stand, the same tokenizer encodes the
whole text, and its offsets say which ids are learned. The mask of ``return_assistant_tokens_mask`` is the same, but
that it forgets an answer whose first character the tokenizer drops.

What is checked, of the template on short conversations and then of each conversation: no text is lost; each answer
ends with its only control piece; an answer begins where the tokenizer cuts any text (at a control piece, a line end),
so that the ids before it do not depend on it; and it is asked for after the text after which it is trained.

Source: transformers 5.23, `apply_chat_template` (tokenization_utils_base.py), `utils/chat_template_utils.py`.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from zerokara.config.tokenizer_config import TURN_PIECES
from zerokara.errors import Fault, UserError
from zerokara.examples.formats import Message, Unlearnable
from zerokara.tokenizer.encoder import Encoder, Ids

Segments = list[Ids]
"""The ids of an example: read, learned, read, learned, …"""
Spans = list[tuple[int, int]]
"""Where the learned parts of a text start and end, in characters."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NUMBERED = re.compile(r"(.*\D)\d+\D*")
_PROBES: tuple[list[Message], ...] = (
    [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}],
    [{"role": role, "content": f"{role} {turn}"} for turn in range(2) for role in ("user", "assistant")],
)
"""Conversations on which every template is tried before any data is read."""
_AUTO = """\
{%- for message in messages -%}
    {%- set text = message['content']
REPLACED
    -%}
    {%- if message['role'] == 'assistant' -%}
        {{- ANSWER -}}
        {%- generation -%}
            {{- text + END -}}
        {%- endgeneration -%}
    {%- elif message['role'] == 'user' -%}
        {{- USER + textAFTER -}}
    {%- elif message['role'] == 'system' -%}
        {{- SYSTEM + textAFTER -}}
    {%- else -%}
        {{- raise_exception("the role '" + message['role'] + "' is none of system, user, assistant") -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- ANSWER -}}
{%- endif -%}
"""


class ChatTemplate:
    """A Jinja template and the tokenizer that encodes what it makes of a conversation.

    Raises:
        UserError: Jinja cannot read it, it marks nothing as learned, loses text, has an answer that begins inside a
            line or has no single end, or a prompt for generation that is not the beginning of what is trained on, or
            that does not end with </s> for an encoder-decoder.
    """

    def __init__(self, source: str, where: str, tokenizer: Any, is_encoder_decoder: bool = False):
        """Take the Jinja text; `where` is its file, for messages; `tokenizer` as `AutoTokenizer` loads it."""
        self.source, self._where, self._tokenizer = source, where, tokenizer
        self._is_encoder_decoder = is_encoder_decoder
        # Without <unk>, which is also what unknown characters are.
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        cuts = {number: token for number, token in added.items() if number != tokenizer.unk_token_id}
        self._cuts = np.array(sorted(cuts), dtype=np.int32)
        self._controls = np.array([number for number, token in cuts.items() if token.special], dtype=np.int32)
        if not _GENERATION.search(source):
            rule = "has no {% generation %} block, which marks what is learned"
            remedy = "write {% generation %}{{ message.content + eos_token }}{% endgeneration %} for the answers"
            raise UserError(Fault(where, rule, remedy=remedy))
        ends = {int(answer[-1]) for messages in _PROBES for answer in self._tried(messages)[1::2]}
        self.end_ids = [tokenizer.eos_token_id, *sorted(ends - {tokenizer.eos_token_id})]
        """The ids at which generation stops: </s>, and others that end the answers."""

    def encode(self, conversations: Sequence[Sequence[Message]]) -> list[Segments | Unlearnable]:
        """Return the segments of each conversation, up to its last answer, or why it cannot be trained on."""
        made = [self._rendered(messages) for messages in conversations]
        texts = [each[0] for each in made if isinstance(each, tuple)]
        encodings = iter(self._tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False))
        return [self._segments(*each, next(encodings)) if isinstance(each, tuple) else each for each in made]

    def _tried(self, messages: Sequence[Message]) -> Segments:
        """The segments of a conversation of `_PROBES`, on which the template may not fail."""
        shown = "; ".join(f"{message['role']}: {message['content']}" for message in messages)
        (made,) = self.encode([messages])
        try:
            prompt, _ = self._filled_in(messages[:-1], for_generation=True)
        except Unlearnable as error:
            made = error
        if isinstance(made, Unlearnable):
            raise UserError(Fault(self._where, f"{made.rule} (tried with {shown})", remedy=made.remedy))
        text, learned = self._filled_in(messages)
        trained = text[: learned[-1][0]]
        if prompt != trained:
            rule = f"asks for an answer after {prompt!r}, but trains it after {trained!r}"
            remedy = "write the same text before {% generation %} and for add_generation_prompt"
            raise UserError(Fault(self._where, rule, remedy=remedy))
        end = self._tokenizer.eos_token
        if self._is_encoder_decoder and not prompt.endswith(end):
            rule = f"must end the prompt with {end}, as every input of an encoder ends, not with {prompt[-20:]!r}"
            remedy = "write {{ eos_token }} before {% generation %}, and at the end"
            raise UserError(Fault(self._where, rule, remedy=remedy))
        return made

    def _rendered(self, messages: Sequence[Message]) -> tuple[str, Spans] | Unlearnable:
        """The text of a conversation, or why it cannot be trained on."""
        try:
            text, learned = self._filled_in(messages)
        except Unlearnable as error:
            return error
        rule = next(_losses(text, learned, messages), "")
        return Unlearnable(f"the chat template {rule}") if rule else (text, learned)

    def _filled_in(self, messages: Sequence[Message], for_generation: bool = False) -> tuple[str, Spans]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template  # a second to import

        try:
            texts, learned = render_jinja_template(
                conversations=[list(messages)],
                chat_template=self.source,
                return_assistant_tokens_mask=True,
                add_generation_prompt=for_generation,
                **self._tokenizer.special_tokens_map,
            )
        except jinja2.TemplateSyntaxError as error:
            raise UserError(Fault(f"{self._where}:{error.lineno}", f"is not Jinja: {error.message}")) from error
        except Exception as error:  # whatever an expression of the template raises
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
            if not lines:
                raise
            raise Unlearnable(f"is refused by the chat template ({self._where}:{lines[-1]}): {error}") from error
        return texts[0], learned[0]

    def _segments(self, text: str, learned: Spans, encoding: Any) -> Segments | Unlearnable:
        ids, offsets = np.array(encoding.ids, dtype=np.int32), np.array(encoding.offsets).reshape(-1, 2)
        places = [place for span in learned for place in span]
        borders = np.searchsorted(offsets[:, 0], places)
        for place, border in zip(places, borders.tolist(), strict=True):
            beside = ids[max(0, border - 1) : border + 1]
            if border and (offsets[border - 1, 1] > place or not np.isin(beside, self._cuts).any()):
                around = f"{text[max(0, place - 20) : place]!r} | {text[place : place + 20]!r}"
                rule = f"the chat template changes between read and learned text inside a line ({around})"
                return Unlearnable(f"{rule}, where ids cannot be cut", "put a line end or a control piece there")
        segments = np.split(ids, borders)[:-1]  # what follows the last answer is read by nobody
        for answer in segments[1::2]:
            controls = np.flatnonzero(np.isin(answer, self._controls))
            if not len(controls) or controls[-1] != len(answer) - 1:
                wrong = f"an answer must end with a control piece, such as {self._tokenizer.eos_token}, in its"
                return Unlearnable(f"{wrong} {{% generation %}} block, else the model never learns to stop")
            if len(controls) > 1:
                names = ", ".join(self._tokenizer.convert_ids_to_tokens(answer[controls].tolist()))
                return Unlearnable(f"an answer holds several control pieces ({names}), but only its end may be one")
        return [np.concatenate(segments[:-1]), segments[-1]] if self._is_encoder_decoder else segments


def _losses(text: str, learned: Spans, messages: Sequence[Message]) -> Iterator[str]:
    """What a template does to messages that do not stand in the text, the answers in learned parts, spaces aside.

    Templates may trim a message; and those of `auto_source` put spaces into the names of control pieces.
    """
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    if len(learned) != len(answers):
        yield f"marks {len(learned)} parts as learned, but there are {len(answers)} answers ({{% generation %}} blocks)"
    for answer, (start, end) in zip(answers, learned, strict=False):
        if _squeezed(answer) not in _squeezed(text[start:end]):
            yield f"loses text: {answer[:40]!r} is not in the learned {text[start:end][:40]!r}"
    borders = [0, *(place for span in learned for place in span), len(text)]
    read, place = _squeezed("\n".join(text[a:b] for a, b in zip(borders[::2], borders[1::2], strict=True))), 0
    for message in messages:
        if message["role"] != "assistant":
            content = _squeezed(message["content"])
            place = read.find(content, place)
            if place < 0:
                yield f"loses text: {message['content'][:40]!r} is not in what it makes of it"
                return
            place += len(content)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def auto_source(encoder: Encoder, is_encoder_decoder: bool = False) -> str:
    """Return the Jinja text of the template made for this tokenizer.

    With the reserved pieces of step 1, a turn begins with the piece of its role, and an answer ends with ``</s>``:
    ``<|user|>How are you?<|assistant|>Fine.</s><|user|>…``. Without them, a turn begins with a line that names the
    role (``user:``), and a user's turn ends with a line end, since text after a line end has ids of its own. With a
    tokenizer that step 1 did not make it has not, so there ``</s>`` takes the place of the line end before an answer.
    For an encoder-decoder it stands there in any case, since every input of an encoder ends with it.

    The names of all control pieces, where a message spells them, get a space behind their first character (``</s>``
    becomes ``< /s>``), in Jinja, so that it holds wherever the template goes.
    """
    controls = {encoder.piece(i) for i in encoder.control_ids}
    end = encoder.piece(encoder.eos_id)
    has_pieces = controls.issuperset(TURN_PIECES.values())
    begins = TURN_PIECES if has_pieces else {role: f"{role}:\n" for role in TURN_PIECES}
    answer = begins["assistant"]
    if is_encoder_decoder:
        answer += end
    elif not has_pieces and not encoder.by_line:
        answer = answer.removesuffix("\n") + end
    # Numbered names (<extra_id_0>) by what they share before their numbers.
    replaced = list[str]()
    for stem, group in groupby(sorted({*controls, encoder.piece(encoder.unk_id)}, key=_stem), key=_stem):
        names = list(group)
        name = stem if len(names) > 1 else names[0]
        if len(name) > 1:
            replaced.append(f"        | replace({_quoted(name)}, {_quoted(name[0] + ' ' + name[1:])})")
    values = {
        "REPLACED": "\n".join(replaced),
        "ANSWER": _quoted(answer),
        "END": _quoted(end),
        "USER": _quoted(begins["user"]),
        "SYSTEM": _quoted(begins["system"]),
        "AFTER": "" if has_pieces else f" + {_quoted(chr(10))}",
    }
    return re.sub("|".join(values), lambda name: values[name[0]], _AUTO)


def _quoted(text: str) -> str:
    """A string of Jinja, whose escapes are Python's."""
    return json.dumps(text, ensure_ascii=False)


def _stem(name: str) -> str:
    numbered = _NUMBERED.fullmatch(name)
    return numbered[1] if numbered else name
