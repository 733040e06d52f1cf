"""Examples → the token files of a split, and the texts that its metric needs; every example is accounted for.

Of the validation and the test examples the texts are written too, one JSON object a line in the order of the token
files: ``place`` (file:line), ``input``, ``reference`` (the answer), ``label`` (or null), ``seen`` (whether a training
example has the same input, white space aside; of a test example, a training or validation example). Of the training
examples only the first conversations are, on which the export is proved (`facts.conversations`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO

import numpy as np
import orjson

from zerokara.errors import Fault, UserError
from zerokara.examples.chat_template import Segments
from zerokara.examples.encoding import Fate, LengthLimit
from zerokara.examples.facts import SplitCounts
from zerokara.examples.formats import Example, Unlearnable
from zerokara.examples.reading import BadRecord, Record
from zerokara.examples.token_files import Write

BATCH = 512
"""Examples that are encoded at once."""
MAX_FAULTS = 5
"""After so many lines that cannot be learned the reading ends."""
MAX_CONVERSATIONS = 1_000
"""Training conversations on which the export is proved."""


class Quarantine:
    """The bad lines of all files, and the lines that cannot be learned."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self.faults: list[Fault] = []

    def add(self, bad: BadRecord) -> None:
        """Write a bad line."""
        self._file.write(orjson.dumps(bad._asdict(), option=orjson.OPT_APPEND_NEWLINE))

    def fault(self, error: Unlearnable, record: Record) -> None:
        """Note a line that cannot be learned; of those with the same label, which one word remedies, the first.

        Raises:
            UserError: there are many.
        """
        if error.key and any((fault.key, fault.value) == (error.key, error.value) for fault in self.faults):
            return
        self.faults.append(error.fault(record.place))
        if len(self.faults) >= MAX_FAULTS:
            raise UserError(self.faults)


@dataclass
class SplitWriter:
    """Encodes, writes and counts the examples of one split."""

    write: Write
    texts: IO[bytes]
    is_train: bool
    encode: Callable[[Sequence[Example]], list[Segments | Unlearnable]]
    limit: LengthLimit
    quarantine: Quarantine
    seen_keys: frozenset[int]
    """Those of the earlier splits."""
    unk_id: int
    counts: SplitCounts = field(default_factory=SplitCounts)
    longest_answer: int = 0
    """Tokens of the longest answer, with its end."""
    unknown_answers: int = 0
    """Answers with a character that the tokenizer does not know."""
    seen: int = 0
    """Examples whose input is that of an example of an earlier split."""
    labels: set[str] = field(default_factory=set)
    """Texts of the labels."""
    keys: array[int] = field(default_factory=lambda: array("Q"))
    """A hash of each example's input."""
    _waiting: list[tuple[Record, Example]] = field(default_factory=list)

    def add(self, record: Record, example: Example) -> None:
        """Take an example."""
        self._waiting.append((record, example))
        if len(self._waiting) == BATCH:
            self.flush()

    def flush(self) -> None:
        """Write what waits for a batch.

        Raises:
            UserError: many lines cannot be learned.
        """
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        written: list[Segments] = []
        for (record, example), segments in zip(waiting, self.encode([each for _, each in waiting]), strict=True):
            try:
                if isinstance(segments, Unlearnable):
                    raise segments
                fitted, fate = self.limit.fit(segments)
            except Unlearnable as error:
                self.quarantine.fault(error, record)
                continue
            setattr(self.counts, fate.value, getattr(self.counts, fate.value) + 1)
            if fate is not Fate.DROPPED:
                written.append(fitted)
                self._count(example, fitted)
                self.counts.cut_learned_tokens += sum(map(len, segments[1::2])) - sum(map(len, fitted[1::2]))
                self._write_text(record, example, fitted, fate)
        self.write(written)

    def _count(self, example: Example, segments: Segments) -> None:
        learned = segments[1::2]
        self.keys.append(example.key)
        self.counts.tokens += sum(map(len, segments))
        self.counts.learned_tokens += sum(map(len, learned))
        self.longest_answer = max(self.longest_answer, *map(len, learned))
        self.unknown_answers += any(self.unk_id in answer for answer in learned)
        if example.label is not None:
            self.labels.add(example.answer)

    def _write_text(self, record: Record, example: Example, segments: Segments, fate: Fate) -> None:
        if not self.is_train:
            seen = self.keys[-1] in self.seen_keys
            self.seen += seen
            line = {"place": record.place, "input": example.input, "reference": example.answer, "label": example.label}
            self.texts.write(orjson.dumps({**line, "seen": seen}, option=orjson.OPT_APPEND_NEWLINE))
        elif example.messages and fate is Fate.KEPT and self.counts.kept <= MAX_CONVERSATIONS:
            prompt, answer = np.concatenate(segments[:-1]).tolist(), segments[-1].tolist()
            chat = {"messages": example.messages, "prompt_ids": prompt, "answer_ids": answer}
            self.texts.write(orjson.dumps(chat, option=orjson.OPT_APPEND_NEWLINE))
