"""Examples → segments of ids, read and learned in turn, that fit a training sequence.

Every segment is encoded by itself, so that the border between a prompt and its answer is where it is at inference: the
model sees the ids of the prompt alone, and generates those of the answer. A decoder's answer ends with one ``</s>``
(that of a conversation with the end its template gives it). An encoder-decoder reads the prompt and ``</s>``, and
learns the answer and ``</s>``.

*Names of control pieces* (``</s>``) in a prompt are that piece to Hugging Face's tokenizer, and so they are here; in an
answer they are text, because a model that writes them in letters generates those ids.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum

import numpy as np

from zerokara.config.finetune_config import Overlong
from zerokara.examples import chat_template
from zerokara.examples.chat_template import BadConversation, ChatTemplate, Span
from zerokara.examples.formats import Example, Unlearnable
from zerokara.tokenizer.encoder import Encoder, Ids

Segments = list[Ids]


class Fate(Enum):
    """What becomes of an example that is longer than a training sequence."""

    KEPT = "kept"
    CUT = "cut"
    DROPPED = "dropped"


class ExampleEncoder:
    """Encodes examples for one model."""

    def __init__(self, encoder: Encoder, is_encoder_decoder: bool, template: ChatTemplate | None):
        self._encoder, self._is_encoder_decoder, self._template = encoder, is_encoder_decoder, template
        self.unk_id = encoder.unk_id
        self._end = np.array([encoder.eos_id], dtype=np.int32)
        names = sorted((encoder.piece(i) for i in encoder.control_ids | {encoder.unk_id}), key=len, reverse=True)
        self._has_control_name = re.compile("|".join(map(re.escape, names))).search

    def __call__(self, examples: Sequence[Example]) -> list[Segments | Unlearnable]:
        """Return the segments of each example, or why there are none."""
        if self._template is not None:
            return [self._conversation(example) for example in examples]
        prompts = self._encoder.encode_many([example.prompt for example in examples])
        answers = self._encoder.encode_many([example.answer for example in examples])
        made: list[Segments | Unlearnable] = []
        for example, prompt, answer in zip(examples, prompts, answers, strict=True):
            if not len(answer):
                made.append(Unlearnable(f"the answer {example.answer[:80]!r} gives no token, so nothing is learned"))
                continue
            if self._has_control_name(example.prompt):
                prompt = chat_template.encode([Span(example.prompt, False)], self._encoder)[0].ids
            read = np.concatenate([prompt, self._end]) if self._is_encoder_decoder else prompt
            made.append(_checked([read, np.concatenate([answer, self._end])]))
        return made

    def _conversation(self, example: Example) -> Segments | Unlearnable:
        assert self._template is not None
        try:
            spans = chat_template.render(self._template, example.messages)
            segments = [segment.ids for segment in chat_template.encode(spans, self._encoder)]
        except BadConversation as error:
            return Unlearnable(str(error))
        segments = segments[: len(segments) - len(segments) % 2]  # what follows the last answer is read by nobody
        if self._is_encoder_decoder:
            return _checked([np.concatenate(segments[:-1]), segments[-1]])
        return _checked(segments)


def _checked(segments: Segments) -> Segments | Unlearnable:
    """Check that something is read first: a decoder could not predict the first token of the answer from nothing."""
    return segments if len(segments[0]) else Unlearnable("no token is read before the answer")


class LengthLimit:
    """Fits examples to the length of a training sequence."""

    def __init__(self, packed_length: int, overlong: Overlong, is_encoder_decoder: bool):
        self._length, self._overlong, self._is_encoder_decoder = packed_length, overlong, is_encoder_decoder
        # A decoder's last token is a label only: it takes no position.
        self._room = packed_length + (0 if is_encoder_decoder else 1)

    def fit(self, segments: Segments) -> tuple[Segments, Fate]:
        """Return the segments, cut where that is asked for, and what became of them.

        Raises:
            Unlearnable: the example is too long, and is neither to be dropped nor can it be cut.
        """
        excess = self._excess(segments)
        if excess <= 0 and not self._answer_is_too_long(segments):
            return segments, Fate.KEPT
        if self._overlong == "drop":
            return segments, Fate.DROPPED
        if self._answer_is_too_long(segments):
            rule = f"the answer has {len(segments[-1]):,} tokens, too many for a packed_length of {self._length:,}"
            raise Unlearnable(rule, "shorten it, raise packed_length, or set overlong: drop")
        if self._overlong == "fail":
            size = f"{self._length + excess:,} positions" + (" to read" if self._is_encoder_decoder else "")
            rule = f"the example needs {size}, and packed_length is {self._length:,}"
            raise Unlearnable(rule, "set overlong to drop or cut_prompt, or raise packed_length")
        return (self._cut_input(segments) if self._is_encoder_decoder else self._cut(segments, excess)), Fate.CUT

    def _excess(self, segments: Segments) -> int:
        """Tokens more than there is room for; those of the encoder input in an encoder-decoder."""
        counted = segments[:1] if self._is_encoder_decoder else segments
        return sum(map(len, counted)) - self._room

    def _answer_is_too_long(self, segments: Segments) -> bool:
        """Whether no prompt is left beside the last answer: a decoder needs one token to predict the first from."""
        return len(segments[-1]) + (0 if self._is_encoder_decoder else 1) > self._room

    def _cut_input(self, segments: Segments) -> Segments:
        """An encoder input without its beginning; its end stays."""
        return [segments[0][-self._length :], segments[1]]

    @staticmethod
    def _cut(segments: Segments, excess: int) -> Segments:
        """The segments without the first tokens; a turn whose question is gone goes with its answer."""
        while len(segments[0]) <= excess:
            excess -= len(segments[0]) + len(segments[1])
            segments = segments[2:]
        return [segments[0][max(0, excess) :], *segments[1:]]
