"""Minimal pairs from held-out text: a sentence against the same sentence with one thing changed.

In: documents in any language. Out: items of two kinds, which a model answers by the higher total log-probability
(`choices`):

* *order*: two neighbouring words inside the sentence change places;
* *word*: a word is replaced by another one of the same text that is as long and about as frequent. These items come in
  couples: `a` stands where `b` is wrong, and in another sentence `b` where `a` is. So no word is easier to get right
  because it is likely by itself, and a model that knows nothing has 50 %.

Both sides have the same number of characters, and the order items the same words. What this measures: whether a model
has learned which words stand beside each other. What it does not: grammar as such. Now and then the changed sentence
is as good as the true one ("old and grey"), so even a perfect model stays below 100 %. Idea: BLiMP (Warstadt et al.,
2020), whose pairs are made by hand for English grammar.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zerokara.evaluation.choices import Item
from zerokara.evaluation.words import Sentence, sentences

KINDS = ("order", "word")
_WORDS = range(4, 61)
"""Words of a sentence that is used: a shorter one says little, and a longer one may be a table."""
_MAX_CHARACTERS = 400
_MIN_COUNT = 3
"""Occurrences of a word that is put in another's place: it is a word of the text, and no slip of the pen."""
_MAX_USES = 4
"""Items in which one word is the true one, so that no handful of words is the whole test."""


@dataclass(frozen=True)
class _Place:
    """A word inside a sentence, joined to its neighbours as `Sentence.leading` says."""

    sentence: Sentence
    number: int
    leading: str

    @property
    def word(self) -> str:
        return self.sentence.word(self.number)

    def item(self, alternatives: Sequence[tuple[str, ...]], num_words: int) -> Item:
        """The item in which `num_words` words from here on are open."""
        sentence = self.sentence
        start, end = sentence.words[self.number][0], sentence.words[self.number + num_words - 1][1]
        parts = tuple(tuple(self.leading + word for word in words) for words in alternatives)
        context = sentence.document[sentence.start : start - len(self.leading)]
        return Item(context, parts, sentence.document[end : sentence.end])


def make(documents: Iterable[str], num_items: int, seed: int) -> dict[str, list[Item]]:
    """Make up to `num_items` items of each kind, the same for the same arguments."""
    chosen = [
        sentence
        for sentence in sentences(documents)
        if len(sentence.words) in _WORDS and len(sentence.text) <= _MAX_CHARACTERS
    ]
    chance = random.Random(f"minimal pairs {seed}")
    chance.shuffle(chosen)
    return {"order": _order_items(chosen, num_items, chance), "word": _word_items(chosen, num_items, chance)}


def _order_items(chosen: Sequence[Sentence], num_items: int, chance: random.Random) -> list[Item]:
    """One item a sentence, at a random place."""
    items: list[Item] = []
    uses: Counter[tuple[str, str]] = Counter()
    for sentence in chosen:
        if len(items) == num_items:
            break
        places = [place for place in _places(sentence) if _is_followed_alike(place)]
        if not places:
            continue
        place = chance.choice(places)
        first, second = place.word, sentence.word(place.number + 1)
        if uses[first, second] < _MAX_USES:
            uses[first, second] += 1
            items.append(place.item([(first, second), (second, first)], 2))
    return items


def _word_items(chosen: Sequence[Sentence], num_items: int, chance: random.Random) -> list[Item]:
    """Couples of places in two sentences whose words change places; a sentence serves once."""
    counts = Counter(sentence.word(number) for sentence in chosen for number in range(len(sentence.words)))
    waiting: dict[tuple[str, int, int], _Place] = {}
    uses: Counter[str] = Counter()
    items: list[Item] = []
    for sentence in chosen:
        if len(items) + 2 > num_items:
            break
        places = [
            place for place in _places(sentence) if counts[place.word] >= _MIN_COUNT and uses[place.word] < _MAX_USES
        ]
        if not places:
            continue
        place = chance.choice(places)
        word = place.word
        key = (place.leading, len(word), counts[word].bit_length())
        other = waiting.get(key)
        if other is None or uses[other.word] == _MAX_USES:
            waiting[key] = place
        elif other.word != word:
            del waiting[key]
            uses.update((word, other.word))
            items += [place.item([(word,), (other.word,)], 1), other.item([(other.word,), (word,)], 1)]
    return items


def _places(sentence: Sentence) -> list[_Place]:
    """The words inside a sentence, neither first nor last, that are no names: they have no capital letter."""
    found = []
    for number in range(1, len(sentence.words) - 1):
        leading, word = sentence.leading(number), sentence.word(number)
        if leading is not None and word == word.lower() and not any(map(str.isdigit, word)):
            found.append(_Place(sentence, number, leading))
    return found


def _is_followed_alike(place: _Place) -> bool:
    """Whether the next word is another one, joined as this one is, with nothing in between, and not the last."""
    sentence, following = place.sentence, place.number + 1
    if following + 1 >= len(sentence.words) or sentence.leading(following) != place.leading:
        return False
    is_next = sentence.words[following][0] == sentence.words[place.number][1] + len(place.leading)
    word = sentence.word(following)
    return is_next and word != place.word and word == word.lower() and not any(map(str.isdigit, word))
