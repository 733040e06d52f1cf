"""Examples → segments of ids, read and learned in turn, that fit a training sequence.

Inputs are encoded as at inference, by the tokenizer that the exported model carries: the name of a control piece
(``</s>``) is that piece. The target of a pair is encoded by itself, as the model generates it; names in it are text. An
answer ends with one ``</s>``, and so does the input of an encoder. Conversations are put into text by `chat_template`.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from zerokara.base.errors import RunError
from zerokara.config.finetune_config import Overlong
from zerokara.examples.chat_template import ChatTemplate, Segments
from zerokara.examples.formats import Example, Message, Unlearnable
from zerokara.tokenizer.encoder import Encoder

Fate = Literal["kept", "cut", "dropped"]
"""Fate of an example that may be longer than a training sequence."""


def prompt_ids(
    tokenizer: Any, prompt: str | Sequence[Message], is_encoder_decoder: bool, ends: Sequence[int]
) -> list[int]:
    """Return the ids of a prompt in training, tests and use; RunError for a conversation without a chat template."""
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt, verbose=False)["input_ids"])
        if is_encoder_decoder or len(ids) < 2 or ids[-1] not in ends:
            return ids
        # Without the end that the tokenizer adds, but with one that the prompt spells.
        spelled = list(tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"])
        return ids[:-1] if ids[-len(spelled) :] != spelled else ids
    if not tokenizer.chat_template:
        raise RunError("the tokenizer has no chat template, which conversations (messages) need")
    return list(tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=True)["input_ids"])


def encode(
    example: Example, encoder: Encoder, tokenizer: Any, template: ChatTemplate | None, is_encoder_decoder: bool
) -> Segments:
    """Return the segments of an example, or raise Unlearnable; `template` is that of conversations."""
    if template is not None:
        segments = template.encode(example.messages)
    else:
        prompt = prompt_ids(tokenizer, example.prompt, is_encoder_decoder, [encoder.eos_id])
        answer = encoder.encode(example.answer)
        if not len(answer):
            raise Unlearnable(f"the answer {example.answer[:80]!r} gives no token, so nothing is learned")
        segments = [np.array(prompt, dtype=np.int32), np.append(answer, np.int32(encoder.eos_id))]
    if not len(segments[0]):  # a decoder could not predict the first token of an answer from nothing
        raise Unlearnable("no token is read before the answer")
    return segments


def fit(
    segments: Segments, length: int, overlong: Overlong, is_encoder_decoder: bool, bos_id: int = -1
) -> tuple[Segments, Fate]:
    """Return the segments, cut to the length of a training sequence where that is asked for, and their fate.

    One that begins with `bos_id` begins with it when it has been cut, too.

    Raises:
        Unlearnable: the example is too long, and is neither to be dropped nor can it be cut.
    """
    # A decoder's last token is a label only: it takes no position. Its answer needs a token to be predicted from.
    label_only = 0 if is_encoder_decoder else 1
    excess = sum(map(len, segments[:1] if is_encoder_decoder else segments)) - length - label_only
    answer_is_too_long = len(segments[-1]) > length
    if excess <= 0 and not answer_is_too_long:
        return segments, "kept"
    if overlong == "drop":
        return segments, "dropped"
    if answer_is_too_long:
        rule = f"the answer has {len(segments[-1]):,} tokens, too many for a packed_length of {length:,}"
        raise Unlearnable(rule, "shorten it, raise packed_length (to the context at most), or set overlong: drop")
    if overlong == "fail":
        size = f"{length + excess:,} positions" + (" to read" if is_encoder_decoder else "")
        rule = f"the example needs {size}, and packed_length is {length:,}"
        raise Unlearnable(rule, "set overlong to drop or cut_prompt, or raise packed_length (to the context at most)")
    if is_encoder_decoder:
        return [segments[0][-length:], segments[1]], "cut"
    begin = segments[0][:1]
    # Whole turns with their answers, but for the last.
    while excess > 0 and len(segments) > 2:
        excess -= len(segments[0]) + len(segments[1])
        segments = segments[2:]
    read = segments[0][max(0, excess) :]
    if begin[0] == bos_id and excess:  # in the place of a token, or where one is free
        read = np.concatenate([begin, read[excess > 0 :]])
    return [read, *segments[1:]], "cut"
