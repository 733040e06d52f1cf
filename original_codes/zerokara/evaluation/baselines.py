"""Baselines of a task: outputs of simple methods for its test data, which the metric judges like a model's.

In: the pairs of source and target that a model is trained on, and the test data. Out: one output for each source.

* ``majority``: the most frequent reference of the test data itself, so that no constant answer is right more often; for
  labels.
* ``bag_of_words``, ``character_ngrams``: logistic regression on words, or on n-grams of 1 to 4 characters within words,
  weighted by tf-idf (scikit-learn); for labels.
* ``copy``: the source itself.
* ``most_frequent_form``: each word of the source becomes what it most often is in the training targets; a word never
  seen stays. Learned from the pairs whose source and target have equally many words.
* ``most_frequent_form_left``: the same, given the word on its left; a pair of words never seen falls back on the above.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import mode
from typing import Any

from zerokara.base.progress import log
from zerokara.corpus import token_hashes
from zerokara.evaluation.scoring import WORD, words

Pair = tuple[str, str]
"""Source and target."""
NamedOutputs = tuple[str, list[str]]
"""A method's name, and its outputs for the test data."""
MIN_ALIGNED = 0.5
"""Share of the training pairs with equally many words below which no words are taken for forms of each other."""
_MANY_PAIRS = 1_000
"""From this many on, what occurs in one text only is left out: it halves the memory and loses nothing."""


def for_labels(train: Sequence[Pair], sources: Sequence[str], references: Sequence[str]) -> Iterator[NamedOutputs]:
    """Baselines of a task whose targets are labels; without training pairs only the majority."""
    yield "majority", majority(references)
    if len({target for _, target in train}) > 1:
        for name, analyzer, ngrams in (("bag_of_words", "word", (1, 1)), ("character_ngrams", "char_wb", (1, 4))):
            if (outputs := classified(train, sources, analyzer, ngrams)) is None:
                log(f"warning: no baseline {name}: nothing that it counts occurs in two training texts")
            else:
                yield name, outputs


def for_texts(train: Sequence[Pair], sources: Sequence[str]) -> Iterator[NamedOutputs]:
    """Baselines of a task whose targets are texts; without training pairs only copying."""
    yield "copy", list(sources)
    aligned = [pair for pair in train if len(words(pair[0])) == len(words(pair[1]))]
    if aligned and len(aligned) >= MIN_ALIGNED * len(train):
        forms = Forms(aligned)
        yield "most_frequent_form", [forms.restored(source) for source in sources]
        yield "most_frequent_form_left", [forms.restored(source, with_left=True) for source in sources]


def majority(references: Sequence[str]) -> list[str]:
    """The most frequent of the references, for each; of several, the first in the alphabet."""
    return [mode(sorted(references))] * len(references)


def classified(
    train: Sequence[Pair], sources: Sequence[str], analyzer: str, ngrams: tuple[int, int]
) -> list[str] | None:
    """Target of each source by logistic regression on tf-idf weighted n-grams; None without any n-gram."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    vectorizer = TfidfVectorizer(
        # Also of scripts that put no space between words.
        analyzer=token_hashes.words if analyzer == "word" else analyzer,
        ngram_range=ngrams,
        sublinear_tf=True,
        min_df=2 if len(train) >= _MANY_PAIRS else 1,
    )
    try:
        features = vectorizer.fit_transform([source for source, _ in train])
    except ValueError:  # all that it raises for texts: no term remains
        return None
    model = LogisticRegression(max_iter=1000).fit(features, [target for _, target in train])
    return [str(label) for label in model.predict(vectorizer.transform(list(sources)))]


class Forms:
    """The most frequent target form of each source word, alone and given the word on its left.

    Of forms that are equally frequent, the one seen first.
    """

    def __init__(self, pairs: Sequence[Pair]):
        """Learn from `pairs`, each with equally many words in source and target."""
        counts: Counter[tuple[str, str]] = Counter()
        for source, target in pairs:
            counts.update(zip(words(source), words(target), strict=True))
        num_forms = Counter(word for word, _ in counts)
        counts_after: Counter[tuple[tuple[str, str], str]] = Counter()
        for source, target in pairs:
            read = words(source)
            for left, word, form in zip(["", *read], read, words(target), strict=False):
                if num_forms[word] > 1:  # else its left word tells nothing, and would only take memory
                    counts_after[(left, word), form] += 1
        self._form, self._form_after = _most_frequent(counts), _most_frequent(counts_after)

    def restored(self, source: str, with_left: bool = False) -> str:
        """The source with each word in its most frequent form; what is between the words stays."""
        left = ""

        def form(match: Any) -> str:
            nonlocal left
            before, left = left, match[0]
            alone = self._form.get(left, left)
            return self._form_after.get((before, left), alone) if with_left else alone

        return str(WORD.sub(form, source))


def _most_frequent(counts: Counter[tuple[Any, str]]) -> dict[Any, str]:
    """For each key the form that was counted most often with it."""
    return {key: form for (key, form), _ in reversed(counts.most_common())}  # the last of a key stays
