"""Overlap of test examples with what a model may have seen: the task's training data, the corpus of its pretraining.

A text of an example overlaps another text

* *exactly*, if it is one of the others, or a line of one, up to white space and Unicode's composed form;
* *by n-gram*, if the two share `NGRAM` words in a row; a text of fewer must be in the other as a whole, and one of
  fewer than eight is compared exactly only: "very good film" is everywhere. What most examples of a task share is left
  out.

Words are those of `corpus.token_hashes`, in lower case; in scripts without spaces three characters stand for one.
13 is the length that the GPT-3 paper looks for (Brown et al. 2020, appendix C), 8 the least that it allows.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from zerokara.corpus.token_hashes import Hashes, NgramIndex, composed, hashes_of, ngrams, tokens_per_word

NGRAM = 13
MOST_OWNERS = 8
"""An n-gram that more than this many examples share, and more than half of a task's, is their instruction, and no sign
that the model has seen any of them."""


@dataclass(frozen=True)
class Overlap:
    """Test examples that occur among other texts; indices in rising order."""

    num_examples: int
    exact: list[int]
    """Examples with a text that is one of the others, or a line of one."""
    by_ngram: list[int]
    """Examples with a text that shares an n-gram with another; those that are found exactly may be among them."""

    @property
    def found(self) -> list[int]:
        """Examples found either way."""
        return sorted({*self.exact, *self.by_ngram})

    @property
    def rest(self) -> list[int]:
        return sorted({*range(self.num_examples)}.difference(self.exact, self.by_ngram))

    def part(self, start: int, num_examples: int) -> "Overlap":
        """Overlap of `num_examples` examples from `start` on, counted from there."""
        inside = range(start, start + num_examples)
        exact, by_ngram = ([index - start for index in each if index in inside] for each in (self.exact, self.by_ngram))
        return Overlap(num_examples, exact, by_ngram)


def find(tasks: Sequence[Sequence[Sequence[str]]], others: Iterable[str]) -> list[Overlap]:
    """Look for the examples of each task, each of one text or several, among `others`, which are read once."""
    whole, hashed, num = dict[str, list[int]](), list[tuple[int, Hashes, int]](), 0
    for examples in tasks:
        of_texts = ((number, text) for number, texts in enumerate(examples, num) for text in texts)
        of_task = [(number, hashes_of(text), tokens_per_word(text)) for number, text in of_texts]
        hashed += _without_shared(of_task, max(MOST_OWNERS, len(examples) // 2))
        for number, texts in enumerate(examples, num):
            for text in texts:
                whole.setdefault(normalized(text), []).append(number)
        num += len(examples)
    index, exact, by_ngram = NgramIndex(hashed, NGRAM), set[int](), set[int]()
    for other in others:
        for line in {other, *other.splitlines()}:
            exact.update(whole.get(normalized(line), ()))
        by_ngram.update(index.owners_of(hashes_of(other)))
    found, starts = Overlap(num, sorted(exact), sorted(by_ngram)), accumulate(map(len, tasks), initial=0)
    return [found.part(start, len(examples)) for start, examples in zip(starts, tasks, strict=False)]


def _without_shared(texts: Sequence[tuple[int, Hashes, int]], most: int) -> Iterator[tuple[int, Hashes, int]]:
    """What is left of texts without the tokens of n-grams that more than `most` examples have."""
    of_example = defaultdict[int, list[Hashes]](lambda: [np.empty(0, np.uint64)])
    for example, hashes, word in texts:
        of_example[example].append(ngrams(hashes, NGRAM * word))
    all_ngrams = [np.unique(np.concatenate(each)) for each in of_example.values()]
    known, counts = np.unique(np.concatenate([np.empty(0, np.uint64), *all_ngrams]), return_counts=True)
    for example, hashes, word in texts:
        is_shared = np.zeros(len(hashes), np.bool_)
        for start in np.flatnonzero(np.isin(ngrams(hashes, NGRAM * word), known[counts > most])):
            is_shared[start : start + NGRAM * word] = True
        edges = np.flatnonzero(is_shared[1:] != is_shared[:-1]) + 1
        parts = zip(np.split(hashes, edges), np.split(is_shared, edges), strict=True)
        yield from ((example, part, word) for part, shared in parts if not shared.any())


def normalized(text: str) -> str:
    """A text up to white space and Unicode's composed form."""
    return " ".join(composed(text).split())
