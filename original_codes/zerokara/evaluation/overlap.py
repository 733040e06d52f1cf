"""Overlap of test examples with what a model may have seen: the task's training data, the corpus of its pretraining.

A text of an example overlaps another text

* *exactly*, if it is one of the others, or a line of one, up to white space and Unicode's composed form;
* *by n-gram*, if the two share `NGRAM` tokens in a row; a text of fewer tokens must be in the other as a whole, and one
  of fewer than eight is compared exactly only: "very good film" is everywhere. What many examples share is left out.

Tokens are those of `corpus.token_hashes`: words in lower case, or single characters in scripts without spaces.
13 is the length that the GPT-3 paper looks for (Brown et al. 2020, appendix C), 8 the least that it allows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zerokara.corpus.token_hashes import NgramIndex, composed, hashes_of

NGRAM = 13
MOST_OWNERS = 8
"""Examples, or a twentieth of them all, that an n-gram may be in; one of more, or of all, is their instruction, and no
sign that any was seen."""


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
        """Examples not found."""
        return sorted({*range(self.num_examples)}.difference(self.exact, self.by_ngram))

    def part(self, start: int, num_examples: int) -> "Overlap":
        """Overlap of `num_examples` examples from `start` on, counted from there."""
        inside = range(start, start + num_examples)
        exact, by_ngram = ([index - start for index in each if index in inside] for each in (self.exact, self.by_ngram))
        return Overlap(num_examples, exact, by_ngram)


def find(examples: Sequence[Sequence[str]], others: Iterable[str]) -> Overlap:
    """Look for `examples`, each of one text or several, among `others`, which are read once."""
    whole: dict[str, list[int]] = {}
    for index, texts in enumerate(examples):
        for text in texts:
            whole.setdefault(normalized(text), []).append(index)
    all_texts = ((index, text) for index, texts in enumerate(examples) for text in texts)
    most = max(1, min(max(MOST_OWNERS, len(examples) // 20), len(examples) - 1))
    ngrams = NgramIndex(all_texts, NGRAM, most=most)
    exact: set[int] = set()
    by_ngram: set[int] = set()
    for other in others:
        for line in {other, *other.splitlines()}:
            exact.update(whole.get(normalized(line), ()))
        by_ngram.update(ngrams.owners_of(hashes_of(other)))
    return Overlap(len(examples), sorted(exact), sorted(by_ngram))


def normalized(text: str) -> str:
    """A text up to white space and Unicode's composed form."""
    return " ".join(composed(text).split())
