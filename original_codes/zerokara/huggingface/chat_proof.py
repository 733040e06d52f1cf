"""Proof that inference equals training in a chat: the exported tokenizer gives the ids that training makes.

In: the encoder and the template of training, the exported folder, conversations: made ones of hostile text, and the
run's own. Out: a `ChatProof`, without which the export fails. For each conversation two things must be equal, both from
stock ``AutoTokenizer.apply_chat_template``: the ids of the whole, and the ids after which the last answer is generated
(``add_generation_prompt``). A conversation that training refuses (an answer that spells its own end, where the template
lets it) is counted and not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from zerokara.examples import made_conversations
from zerokara.examples.chat_template import BadConversation, ChatTemplate, Message, Segment, encode, render
from zerokara.huggingface.tokenizer_proof import MAX_SHOWN, MAX_TIE_SHARE, Ties, load
from zerokara.progress import Progress
from zerokara.tokenizer.encoder import Encoder

_BATCH = 256
_MAX_TRIES = 4
"""Made conversations tried for each that is compared, before a template counts as one that refuses nearly all."""


@dataclass
class ChatProof:
    """The result of a comparison."""

    wanted: int
    """Made conversations to compare."""
    made: int = 0
    """Made conversations compared."""
    own: int = 0
    """Conversations of the training data compared."""
    refused: int = 0
    """Conversations that training refuses."""
    ties: int = 0
    """Conversations that differ by a tie only (unigram tokenizers that step 1 did not make)."""
    num_failures: int = 0
    failures: list[str] = field(default_factory=list)
    """The first conversations with other ids."""

    @property
    def ok(self) -> bool:
        """Whether the template gives the ids of training, so that it may be published."""
        compared = self.made + self.own
        return not self.num_failures and self.made >= self.wanted and self.ties <= max(1, MAX_TIE_SHARE * compared)

    def __str__(self) -> str:
        text = (
            f"{self.made:,} made conversations and {self.own:,} of the training data: {self.num_failures:,} failures, "
            f"{self.ties:,} ties, {self.refused:,} refused"
        )
        if self.num_failures:
            return f"{text}; first failure: {self.failures[0]}"
        return text if self.made >= self.wanted else f"{text}; fewer than {self.wanted:,} could be compared"

    def as_json(self, examples: bool = False) -> dict[str, Any]:
        """All counts, and whether the proof holds; `examples` adds conversations that differ."""
        names = ("made", "own", "refused", "ties")
        counts = {"holds": self.ok, **{name: getattr(self, name) for name in names}, "failures": self.num_failures}
        return counts | ({"examples": self.failures} if examples else {})


def prove(
    encoder: Encoder,
    template: ChatTemplate,
    hf_folder: Path,
    texts: Sequence[str],
    own: Iterable[Sequence[Message]],
    wanted: int = 10_000,
) -> ChatProof:
    """Compare the two on `wanted` made conversations, whose messages hold some of `texts`, and on all of `own`."""
    proof = ChatProof(wanted)
    comparison = _Comparison(encoder, template, load(hf_folder), proof)
    proof.own = sum(map(comparison.compare, _batches(own)))
    made = islice(made_conversations.made(encoder, texts), _MAX_TRIES * wanted)
    with Progress("comparing conversations", total=wanted, unit="conversation") as progress:
        for batch in _batches(made, min(_BATCH, wanted)):
            if proof.made >= wanted:
                break
            compared = comparison.compare(batch)
            proof.made += compared
            progress.advance(compared)
            progress.note(failures=proof.num_failures)
    return proof


class _Comparison:
    """Compares conversations, and counts ties and failures in `proof`."""

    def __init__(self, encoder: Encoder, template: ChatTemplate, theirs: Any, proof: ChatProof) -> None:
        self._encoder, self._template, self._theirs, self._proof = encoder, template, theirs, proof
        self._ties = Ties(encoder)

    def compare(self, conversations: Sequence[Sequence[Message]]) -> int:
        """Compare those that training takes; returns their number."""
        taken = [(messages, segments) for messages in conversations if (segments := self._segments(messages))]
        if not taken:
            return 0
        whole = self._applied([messages for messages, _ in taken])
        prompts = self._applied([messages[:-1] for messages, _ in taken], add_generation_prompt=True)
        for (messages, segments), their_ids, their_prompt in zip(taken, whole, prompts, strict=True):
            last = max(i for i, segment in enumerate(segments) if segment.is_learned)
            self._check("ids", messages, _joined(segments), their_ids)
            self._check("ids before the last answer", messages, _joined(segments[:last]), their_prompt)
        return len(taken)

    def _segments(self, messages: Sequence[Message]) -> list[Segment]:
        try:
            return encode(render(self._template, messages), self._encoder)
        except BadConversation:
            self._proof.refused += 1
            return []

    def _applied(self, conversations: Sequence[Sequence[Message]], **asked: Any) -> list[list[int]]:
        plain = [[dict(message) for message in messages] for messages in conversations]
        # Not verbose: a conversation longer than the context is no fault here.
        quiet = {"verbose": False}
        ids = self._theirs.apply_chat_template(plain, tokenize=True, return_dict=False, tokenizer_kwargs=quiet, **asked)
        return [list(each) for each in ids]

    def _check(self, what: str, messages: Sequence[Message], ours: list[int], theirs: list[int]) -> None:
        if ours == theirs:
            return
        if self._ties.is_tie(ours, theirs):
            self._proof.ties += 1
            return
        self._proof.num_failures += 1
        if len(self._proof.failures) < MAX_SHOWN:
            pairs = enumerate(zip(ours, theirs, strict=False))
            place = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
            window = slice(max(0, place - 3), place + 5)
            shown = str([dict(message) for message in messages])
            shown = shown if len(shown) <= 200 else shown[:199] + "…"
            found = f"{what} of {shown} at token {place}: ours {ours[window]}, theirs {theirs[window]}"
            self._proof.failures.append(found)


def _joined(segments: Sequence[Segment]) -> list[int]:
    return [int(i) for i in np.concatenate([np.empty(0, np.int32), *(segment.ids for segment in segments)])]


def _batches(conversations: Iterable[Sequence[Message]], size: int = _BATCH) -> Iterable[list[Sequence[Message]]]:
    remaining = iter(conversations)
    return iter(lambda: list(islice(remaining, size)), [])
