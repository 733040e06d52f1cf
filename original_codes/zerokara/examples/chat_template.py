"""The chat template of conversations: which one, what it makes of a conversation, and which of the ids are learned.

Text and ids are those of ``tokenizer.apply_chat_template``: the same render function of transformers
fills the template in and says where its ``{% generation %}`` blocks stand, the same tokenizer encodes the whole text,
and its offsets say which ids are learned. The mask of ``return_assistant_tokens_mask`` is the same, but that it forgets
an answer whose first character the tokenizer drops. Checks, of short conversations and then of each: no text is lost;
each answer ends with its only control piece, and begins where the tokenizer cuts any text (at a control piece, a line
end), so that the ids before it do not depend on it; and it is asked for after the text after which it is trained.

Source: transformers 5.23, `apply_chat_template` (tokenization_utils_base.py), `utils/chat_template_utils.py`.
"""

import json
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from zerokara.base.errors import Fault, UserError
from zerokara.base.progress import log
from zerokara.config.finetune_config import FinetuneRunConfig
from zerokara.config.loading import text_of
from zerokara.config.tokenizer_config import TURN_PIECES
from zerokara.examples.formats import Message, Unlearnable, extra_keys
from zerokara.tokenizer.encoder import Encoder, Ids

Segments = list[Ids]
"""The ids of an example: read, learned, read, learned, …"""
Spans = list[tuple[int, int]]
"""Start and end of the learned parts of a text, in characters."""

_NUMBERED = re.compile(r"\A(.*\D)\d+\D*\Z")
_PROBES: tuple[list[Message], ...] = (
    [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}],
    [{"role": role, "content": f"{role} {turn}"} for turn in range(2) for role in ("user", "assistant")],
)
"""Conversations on which every template is tried before any data is read."""
_CHANCE = re.compile(r"\b(?:strftime_now|lipsum)\b|\|\s*random\b")
MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Beginning of what a template marks as learned."""
_TURNS = {
    "<|im_start|>": ("<|im_start|>{}\n", "<|im_end|>", "\n", False),
    "<|start_header_id|>": ("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", "", True),
}
"""Turns of ChatML (Qwen) and of Llama 3, by a control piece: how one begins, how it ends, what is between two, and
whether <bos> stands before the first."""
_AUTO_PATH = Path(__file__).with_name("auto_chat_template.jinja")


class ChatTemplate:
    """A Jinja template, and the tokenizer that encodes a conversation filled into it.

    Raises:
        UserError: Jinja cannot read it, it marks nothing as learned, loses text, has an answer that begins inside a
            line or has no single end, or a prompt for generation that is not the beginning of what is trained on, or
            that does not end with </s> for an encoder-decoder.
    """

    def __init__(self, source: str, where: str, tokenizer: Any, is_encoder_decoder: bool = False):
        """Take the Jinja text; `where` is its file, for messages; `tokenizer` as `AutoTokenizer` loads it."""
        self.source, self._where, self._tokenizer = source, where, tokenizer
        self._is_encoder_decoder = is_encoder_decoder
        # By id, whether text is cut there, and whether it is a control piece.
        self._is_cut, self._is_control = np.zeros((2, len(tokenizer)), dtype=np.bool_)
        for number, token in tokenizer.backend_tokenizer.get_added_tokens_decoder().items():
            if number != tokenizer.unk_token_id:  # which unknown characters are, too
                self._is_cut[number], self._is_control[number] = True, token.special
        if not MARK.search(source):
            rule = "has no {% generation %} block, which marks what is learned"
            remedy = "write {% generation %}{{ message.content + eos_token }}{% endgeneration %} for the answers"
            raise UserError(Fault(where, rule, remedy=remedy))
        if chance := _CHANCE.search(source):
            place, rule = source.count("\n", 0, chance.start()) + 1, f"makes other text each time ({chance[0]})"
            raise UserError(Fault(f"{where}:{place}", rule, remedy="write the text, such as a date, in its place"))
        ends = {int(answer[-1]) for messages in _PROBES for answer in self._tried(messages)[1::2]}
        own = {tokenizer.eos_token_id} - {None}
        self.end_ids = [*own, *sorted(ends - own)]
        """Ids at which generation stops: </s>, and others that end the answers."""

    def encode(self, messages: Sequence[Message]) -> Segments:
        """Return the segments of a conversation, up to its last answer; Unlearnable if it cannot be trained on."""
        text, learned = self._filled_in(messages)
        for rule in chain(_losses(text, learned, messages), self._unread(text, learned, messages)):
            raise Unlearnable(f"the chat template {rule}")
        answers = (message for message in messages if message["role"] == "assistant")
        return self._segments(text, [span for span, each in zip(learned, answers, strict=True) if "weight" not in each])

    def _tried(self, messages: Sequence[Message]) -> Segments:
        """Segments of a conversation of `_PROBES`, on which the template may not fail."""
        shown = "; ".join(f"{message['role']}: {message['content']}" for message in messages)
        try:
            segments = self.encode(messages)
            prompt, _ = self._filled_in(messages[:-1], for_generation=True)
        except Unlearnable as error:
            fault = replace(error.fault, where=self._where, rule=f"{error} (tried with {shown})")
            raise UserError(fault) from error
        text, learned = self._filled_in(messages)
        trained, end = text[: learned[-1][0]], self._tokenizer.eos_token
        if prompt != trained:
            rule = f"asks for an answer after {prompt!r}, but trains it after {trained!r}"
            remedy = "write the same text before {% generation %} and for add_generation_prompt"
            raise UserError(Fault(self._where, rule, remedy=remedy))
        if self._is_encoder_decoder and not prompt.endswith(end):
            rule = f"must end the prompt with {end}, as every input of an encoder ends, not with {prompt[-20:]!r}"
            remedy = "write {{ eos_token }} before {% generation %}, and at the end"
            raise UserError(Fault(self._where, rule, remedy=remedy))
        return segments

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
            rule = f"is refused by the chat template ({self._where}:{lines[-1]}): {error}"
            raise Unlearnable(rule, "mend it, or name a chat_template that takes it") from error
        return texts[0], learned[0]

    def _unread(self, text: str, learned: Spans, messages: Sequence[Message]) -> Iterator[str]:
        """Yield a fault for each extra field of a message, such as `tool_calls`, that does not change the text."""
        for number, message in enumerate(messages):
            for key in extra_keys(message):
                without = [*messages[:number], {**message, key: None}, *messages[number + 1 :]]
                with suppress(Unlearnable):  # where the template needs it
                    other, spans = self._filled_in(without)
                    is_learned = [text[slice(*span)] for span in learned] != [other[slice(*span)] for span in spans]
                    if text == other or (message["role"] == "assistant" and not is_learned):
                        yield f"does not write {key!r} of message {number + 1}: remove it, or name a template that does"

    def _segments(self, text: str, learned: Spans) -> Segments:
        encode = partial(self._tokenizer.backend_tokenizer.encode, add_special_tokens=False)
        encoding = encode(text)
        ids, offsets = np.array(encoding.ids, dtype=np.int32), np.array(encoding.offsets).reshape(-1, 2)
        places = [place for span in learned for place in span]
        borders = np.searchsorted(offsets[:, 0], places)
        for place, border in zip(places, borders.tolist(), strict=True):
            before, beside = text[:place], ids[max(0, border - 1) : border + 1]
            is_cut = self._is_cut[beside].any()
            if not is_cut and before.endswith("\n"):  # does it have the same ids alone as before an answer?
                is_cut = encode(before).ids == ids[:border].tolist()
            if border and (offsets[border - 1, 1] > place or not is_cut):
                around = f"{text[max(0, place - 20) : place]!r} | {text[place : place + 20]!r}"
                rule = f"the chat template changes between read and learned text inside a line ({around})"
                raise Unlearnable(f"{rule}, where ids cannot be cut", "put a line end or a control piece there")
        segments = np.split(ids, borders)[:-1]  # what follows the last answer is read by nobody
        for answer in segments[1::2]:
            controls = np.flatnonzero(self._is_control[answer])
            if not len(controls) or controls[-1] != len(answer) - 1:
                wrong = f"an answer must end with a control piece, such as {self._tokenizer.eos_token}, in its"
                raise Unlearnable(f"{wrong} {{% generation %}} block, else the model never learns to stop")
            if len(controls) > 1:
                names = ", ".join(self._tokenizer.convert_ids_to_tokens(answer[controls].tolist()))
                raise Unlearnable(f"an answer holds several control pieces ({names}), but only its end may be one")
        return [np.concatenate(segments[:-1]), segments[-1]] if self._is_encoder_decoder else segments


def _losses(text: str, learned: Spans, messages: Sequence[Message]) -> Iterator[str]:
    """Rules that a template breaks: messages are not in its text, or answers not in learned parts, spaces aside."""
    # Templates may trim a message; and those of `auto_source` put spaces into the names of control pieces.
    answers = sum(message["role"] == "assistant" for message in messages)
    if len(learned) != answers:
        yield f"marks {len(learned)} parts as learned, but there are {answers} answers ({{% generation %}} blocks)"
    borders = [0, *(place for span in learned for place in span), len(text)]
    parts = ["".join(text[start:end].split()) for start, end in pairwise(borders)]
    read, place, spans = "\n".join(parts[::2]), 0, iter(parts[1::2])
    for message in messages:
        content, is_answer = "".join(message["content"].split()), message["role"] == "assistant"
        place = place if is_answer else read.find(content, place) + len(content)
        if content not in next(spans, "") if is_answer else place < len(content):
            yield f"loses text: {message['content'][:40]!r} is not in what it makes of it, or not where it belongs"


def of_config(config: FinetuneRunConfig, encoder: Encoder, tokenizer: Any) -> ChatTemplate:
    """Read the template that the configuration names, or make that of `auto`."""
    path, is_auto, own = config.chat_template, config.chat_template == "auto", tokenizer.chat_template
    is_encoder_decoder = config.traits.is_encoder_decoder
    own = own.get("default") if isinstance(own, dict) else own  # of several by name, as transformers takes it
    if not is_auto:
        source = text_of(Path(path), "chat_template")
    elif own and MARK.search(own):  # that of the folder
        source = own
    else:
        source = auto_source(encoder, is_encoder_decoder)
        if own:
            log("chat_template: auto: the model's own does not mark what is learned; another takes its place")
    return ChatTemplate(source, "chat_template: auto" if is_auto else path, tokenizer, is_encoder_decoder)


def auto_source(encoder: Encoder, is_encoder_decoder: bool = False) -> str:
    """Return the Jinja text of the template made for this tokenizer.

    ``<|user|>How are you?<|assistant|>Fine.</s><|user|>…``; without the reserved pieces of step 1, a line that names
    the role (``user:``) begins a turn, since text after a line end has ids of its own. A tokenizer that step 1 did not
    make may encode such text otherwise, so there ``</s>`` replaces the line end before an answer. A tokenizer with the
    control pieces of ChatML or Llama 3 gets the turns of that format. The names of control pieces in messages get a
    space behind their first character (``</s>`` becomes ``< /s>``).
    """
    quoted = partial(json.dumps, ensure_ascii=False)  # Jinja's escapes are Python's
    controls = {encoder.pieces[i] for i in encoder.control_ids}
    end = encoder.pieces[encoder.eos_id]
    has_pieces = controls.issuperset(TURN_PIECES.values())
    begins = TURN_PIECES if has_pieces else {role: f"{role}:\n" for role in TURN_PIECES}
    after, between, first = "" if has_pieces else "\n", "", ""
    turns = next((turns for piece, turns in _TURNS.items() if {piece, turns[1]} <= controls), None)
    if turns and not has_pieces and not is_encoder_decoder:
        begins, end, between = {role: turns[0].format(role) for role in TURN_PIECES}, turns[1], turns[2]
        after, first = end + between, encoder.pieces[encoder.bos_id] if turns[3] and encoder.bos_id >= 0 else ""
    answer = begins["assistant"]
    if is_encoder_decoder:
        answer += end  # as every input of an encoder ends
    elif not has_pieces and not encoder.by_line and not turns:
        answer = answer.removesuffix("\n") + end
    # Numbered names (<extra_id_0>) by what they share before their numbers.
    stem_of, replaced = partial(_NUMBERED.sub, r"\1"), list[str]()
    for stem, group in groupby(sorted((encoder.pieces[i] for i in encoder.special_ids), key=stem_of), key=stem_of):
        names = list(group)
        name = stem if len(names) > 1 else names[0]
        if len(name) > 1:
            replaced.append(f"        | replace({quoted(name)}, {quoted(name[0] + ' ' + name[1:])})")
    values = {
        "REPLACED": "\n".join(replaced),
        "ANSWER": quoted(answer),
        "END": quoted(end),
        "USER": quoted(begins["user"]),
        "SYSTEM": quoted(begins["system"]),
        "AFTER": after and f" + {quoted(after)}",
        "BETWEEN": between and f"{{{{- {quoted(between)} -}}}}",
        "FIRST": first and f"{{{{- {quoted(first)} -}}}}",
    }
    return re.sub("|".join(values), lambda name: values[name[0]], _AUTO_PATH.read_text(encoding="utf-8"))
