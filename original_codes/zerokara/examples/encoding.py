"""Examples → segments of ids, read and learned in turn, that fit a training sequence.

What is read is encoded as it is at inference, by the tokenizer that the exported model carries: the name of a control
piece (``</s>``) is that piece. What is learned is encoded by itself, so that the border is where it is at inference;
names in it are text, because a model that writes them in letters generates those ids. A decoder's answer ends with one
``</s>``. An encoder-decoder reads the prompt and ``</s>``, and learns the answer and ``</s>``. Conversations are
`chat_template`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np

from zerokara.config.finetune_config import Overlong
from zerokara.examples.chat_template import ChatTemplate, Segments
from zerokara.examples.formats import Example, Unlearnable
from zerokara.tokenizer.encoder import Encoder


class Fate(Enum):
    """What becomes of an example that is longer than a training sequence."""

    KEPT = "kept"
    CUT = "cut"
    DROPPED = "dropped"


def encode(
    examples: Sequence[Example], encoder: Encoder, tokenizer: Any, template: ChatTemplate | None
) -> list[Segments | Unlearnable]:
    """Return the segments of each example, or why there are none; `template` is that of conversations."""
    if template is not None:
        made = template.encode([example.messages for example in examples])
    else:
        # Verbose, it would warn of a text that is longer than the context.
        prompts = tokenizer([example.prompt for example in examples], verbose=False)["input_ids"]
        answers = encoder.encode_many([example.answer for example in examples])
        end = np.array([encoder.eos_id], dtype=np.int32)
        made = [
            [np.array(prompt, dtype=np.int32), np.concatenate([answer, end])]
            if len(answer)
            else Unlearnable(f"the answer {example.answer[:80]!r} gives no token, so nothing is learned")
            for example, prompt, answer in zip(examples, prompts, answers, strict=True)
        ]
    # A decoder could not predict the first token of an answer from nothing.
    nothing = Unlearnable("no token is read before the answer")
    return [each if isinstance(each, Unlearnable) or len(each[0]) else nothing for each in made]


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
        counted = segments[:1] if self._is_encoder_decoder else segments
        excess = sum(map(len, counted)) - self._room
        # A decoder needs one token to predict the first one of the last answer from.
        answer_is_too_long = len(segments[-1]) + (0 if self._is_encoder_decoder else 1) > self._room
        if excess <= 0 and not answer_is_too_long:
            return segments, Fate.KEPT
        if self._overlong == "drop":
            return segments, Fate.DROPPED
        if answer_is_too_long:
            rule = f"the answer has {len(segments[-1]):,} tokens, too many for a packed_length of {self._length:,}"
            raise Unlearnable(rule, "shorten it, raise packed_length, or set overlong: drop")
        if self._overlong == "fail":
            size = f"{self._length + excess:,} positions" + (" to read" if self._is_encoder_decoder else "")
            rule = f"the example needs {size}, and packed_length is {self._length:,}"
            raise Unlearnable(rule, "set overlong to drop or cut_prompt, or raise packed_length")
        if self._is_encoder_decoder:
            return [segments[0][-self._length :], segments[1]], Fate.CUT
        # A turn whose question is gone goes with its answer.
        while len(segments[0]) <= excess:
            excess -= len(segments[0]) + len(segments[1])
            segments = segments[2:]
        return [segments[0][max(0, excess) :], *segments[1:]], Fate.CUT
