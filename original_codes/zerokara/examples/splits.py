"""Records of files → the token files of a split, and the texts that its metric needs; every record is accounted for.

Of the validation and the test examples the texts are written too, one JSON object a line in the order of the token
files: ``place`` (file:line), ``input``, ``reference`` (the answer), ``label`` (or null), ``seen`` (whether a
training example has the same input, white space aside; of a test example, a training or validation example).

The validation examples that are drawn from the training data are whole groups of equal inputs, so that no text is on
both sides.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from zerokara.corpus.inputs import InputFile
from zerokara.durable import atomic_file
from zerokara.errors import Fault, UserError
from zerokara.examples.encoding import ExampleEncoder, Fate, LengthLimit, Segments
from zerokara.examples.facts import SplitCounts
from zerokara.examples.formats import Example, ExampleFormat, Unlearnable, read_examples
from zerokara.examples.reading import BadRecord, Record, read_records
from zerokara.examples.token_files import ExampleWriter, example_writer
from zerokara.progress import Progress

BATCH = 512
"""Examples that are encoded at once."""
MAX_FAULTS = 5
"""After so many lines that cannot be learned the reading ends."""

Keys = NDArray[np.uint64]


@dataclass
class SplitTally:
    """What has become of a split's records so far."""

    kept: int = 0
    cut: int = 0
    dropped: int = 0
    bad: int = 0
    tokens: int = 0
    learned_tokens: int = 0
    cut_learned_tokens: int = 0
    """Tokens of answers that were cut away with their questions."""
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

    @property
    def counts(self) -> SplitCounts:
        """The counts, which close."""
        return SplitCounts(
            self.kept, self.cut, self.dropped, self.bad, self.tokens, self.learned_tokens, self.cut_learned_tokens
        )

    def sorted_keys(self) -> Keys:
        """The hashes of all inputs, each once, sorted."""
        return np.unique(np.array(self.keys, dtype=np.uint64))


class Quarantine:
    """The bad lines of all files, and the lines that cannot be learned."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self.num_lines = 0
        self.faults: list[Fault] = []

    def add(self, bad: BadRecord) -> None:
        """Write a bad line."""
        self._file.write(orjson.dumps(bad._asdict(), option=orjson.OPT_APPEND_NEWLINE))
        self.num_lines += 1

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

    def check(self) -> None:
        """Check that every line could be learned.

        Raises:
            UserError: one could not.
        """
        if self.faults:
            raise UserError(self.faults)


class SplitWriter:
    """Encodes and writes the examples of one split."""

    def __init__(
        self,
        tokens: ExampleWriter,
        texts: IO[bytes] | None,
        encode: ExampleEncoder,
        limit: LengthLimit,
        quarantine: Quarantine,
        seen_keys: Keys,
    ):
        self.tally = SplitTally()
        self._tokens, self._texts, self._encode, self._limit = tokens, texts, encode, limit
        self._quarantine, self._seen_keys = quarantine, seen_keys
        self._waiting: list[tuple[Record, Example]] = []

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
        written: list[tuple[Record, Example, Segments]] = []
        for (record, example), segments in zip(waiting, self._encode([each for _, each in waiting]), strict=True):
            try:
                if isinstance(segments, Unlearnable):
                    raise segments
                fitted, fate = self._limit.fit(segments)
            except Unlearnable as error:
                self._quarantine.fault(error, record)
                continue
            self._count(fate)
            if fate is not Fate.DROPPED:
                self.tally.cut_learned_tokens += _num_learned(segments) - _num_learned(fitted)
                written.append((record, example, fitted))
        self._write(written)

    def _count(self, fate: Fate) -> None:
        setattr(self.tally, fate.value, getattr(self.tally, fate.value) + 1)

    def _write(self, written: Sequence[tuple[Record, Example, Segments]]) -> None:
        if not written:
            return
        tally = self.tally
        self._tokens.add([segments for _, _, segments in written])
        keys = [example.key for _, example, _ in written]
        tally.keys.extend(keys)
        for _, example, segments in written:
            learned = segments[1::2]
            tally.tokens += sum(map(len, segments))
            tally.learned_tokens += _num_learned(segments)
            tally.longest_answer = max(tally.longest_answer, *map(len, learned))
            tally.unknown_answers += any(self._encode.unk_id in answer for answer in learned)
            if example.label is not None:
                tally.labels.add(example.answer)
        if self._texts is None:
            return
        for (record, example, _), seen in zip(written, _are_among(keys, self._seen_keys), strict=True):
            tally.seen += seen
            self._texts.write(_text_line(record, example, seen))


def _num_learned(segments: Segments) -> int:
    return sum(map(len, segments[1::2]))


def _are_among(keys: Sequence[int], known: Keys) -> list[bool]:
    """Whether each key is one of the sorted `known` ones."""
    if not len(known):
        return [False] * len(keys)
    wanted = np.array(keys, dtype=np.uint64)
    places = np.searchsorted(known, wanted).clip(max=len(known) - 1)
    found: list[bool] = (known[places] == wanted).tolist()
    return found


def _text_line(record: Record, example: Example, seen: bool) -> bytes:
    values = {
        "place": record.place,
        "input": example.input,
        "reference": example.answer,
        "label": example.label,
        "seen": seen,
    }
    return orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE)


@contextmanager
def split_writer(
    prefix: Path,
    texts_path: Path | None,
    dtype: np.dtype[Any],
    encode: ExampleEncoder,
    limit: LengthLimit,
    quarantine: Quarantine,
    seen_keys: Keys,
) -> Iterator[SplitWriter]:
    """Yield a writer of a split; its files appear when the block ends without an error."""
    with ExitStack() as stack:
        texts = stack.enter_context(atomic_file(texts_path)) if texts_path else None
        tokens = stack.enter_context(example_writer(prefix, dtype))
        writer = SplitWriter(tokens, texts, encode, limit, quarantine, seen_keys)
        yield writer
        writer.flush()
        quarantine.check()


def read_into(
    files: Sequence[InputFile],
    form: ExampleFormat,
    first: SplitWriter,
    quarantine: Quarantine,
    progress: Progress,
    other: SplitWriter | None = None,
    is_other: Callable[[int], bool] = lambda key: False,
) -> None:
    """Read files into the writer of a split; those whose key `is_other` picks into that of the other one.

    Bad lines count as those of the first.

    Raises:
        UserError: a file is damaged, or lines cannot be learned.
    """
    for record, example in _examples(files, form, progress):
        if isinstance(record, BadRecord):
            first.tally.bad += 1
            quarantine.add(record)
        elif isinstance(example, Unlearnable):
            quarantine.fault(example, record)
        else:
            assert example is not None
            (other if other is not None and is_other(example.key) else first).add(record, example)


def draw(
    files: Sequence[InputFile], form: ExampleFormat, fraction: float, seed: int, progress: Progress
) -> frozenset[int]:
    """Draw the inputs, by their keys, whose examples are about this share of all; at least one, but never all."""
    keys = array("Q")
    for _, example in _examples(files, form, progress):
        if isinstance(example, Example):
            keys.append(example.key)
    distinct, counts = np.unique(np.array(keys, dtype=np.uint64), return_counts=True)
    order = np.random.default_rng(seed).permutation(len(distinct))[:-1]
    wanted = max(1, round(fraction * len(keys)))
    num_drawn = int(np.searchsorted(np.cumsum(counts[order]), wanted)) + 1
    return frozenset(distinct[order[:num_drawn]].tolist())


def _examples(
    files: Sequence[InputFile], form: ExampleFormat, progress: Progress
) -> Iterator[tuple[Record, Example | Unlearnable] | tuple[BadRecord, None]]:
    """Each record of files with its texts."""
    for file in files:
        done = 0

        def at(position: int) -> None:
            nonlocal done
            progress.advance(position - done)
            done = position

        yield from read_examples(form, read_records(file, at))
