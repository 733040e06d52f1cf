"""Last-word cloze from held-out text: which of several words ends this sentence?

In: documents in any language. Out: items: a text that breaks off before the last word of a sentence, that word, and
others of like frequency, of which a model picks the one that makes the likeliest text, the punctuation after it
included (`choices`).

Sentences are taken in blocks of as many as there are alternatives, with different last words, and each is asked with
the last words of all. So every word is right once and wrong in all the rest, and a model that knows words but not the
text before them, or nothing at all, has exactly the share of guessing.

What this measures: whether a model uses a longer context, mostly what the text is about. What it does not: the chance
that the model writes that word by itself. The idea of asking for last words is LAMBADA's (Paperno et al., 2016), whose
passages were chosen by people.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from zerokara.evaluation.choices import Item
from zerokara.evaluation.words import Sentence, sentences

NUM_ALTERNATIVES = 4
_MIN_WORDS = 4
_MIN_COUNT = 2
_MAX_USES = 4
"""Items in which one word is the true one."""
CONTEXT_CHARACTERS = 400
"""Text before the last word, as long as a document has it."""


def make(documents: Iterable[str], num_items: int, seed: int, num_alternatives: int = NUM_ALTERNATIVES) -> list[Item]:
    """Make up to `num_items` items in whole blocks, the same for the same arguments."""
    found = list(sentences(documents))
    counts = Counter(sentence.word(number) for sentence in found for number in range(len(sentence.words)))
    chance = random.Random(f"cloze {seed}")
    chance.shuffle(found)
    blocks: defaultdict[tuple[str, int], list[Sentence]] = defaultdict(list)
    uses: Counter[str] = Counter()
    items: list[Item] = []
    for sentence in found:
        if len(items) + num_alternatives > num_items:
            break
        last = len(sentence.words) - 1
        leading = sentence.leading(last) if last + 1 >= _MIN_WORDS else None
        if leading is None or not _is_asked(word := sentence.word(last), counts) or uses[word] >= _MAX_USES:
            continue
        block = blocks[leading, counts[word].bit_length()]
        if word not in map(_last_word, block):
            block.append(sentence)
            uses[word] += 1
        if len(block) == num_alternatives:
            items += _items(block, leading)
            block.clear()
    return items


def _is_asked(word: str, counts: Counter[str]) -> bool:
    return counts[word] >= _MIN_COUNT and not any(map(str.isdigit, word))


def _items(block: Sequence[Sentence], leading: str) -> list[Item]:
    words = [_last_word(sentence) for sentence in block]
    items = []
    for sentence, word in zip(block, words, strict=True):
        start, end = sentence.words[-1]
        others = [other for other in words if other != word]
        alternatives = tuple((leading + each,) for each in (word, *others))
        context = _context(sentence.document, start - len(leading))
        items.append(Item(context, alternatives, sentence.document[end : sentence.end]))
    return items


def _last_word(sentence: Sentence) -> str:
    return sentence.word(len(sentence.words) - 1)


def _context(document: str, end: int) -> str:
    """The text before `end`, cut after a space or a line end where there is one, not within a word."""
    if end <= CONTEXT_CHARACTERS:
        return document[:end]
    text = document[end - CONTEXT_CHARACTERS : end]
    cut = min((place for place in (text.find(" "), text.find("\n")) if place >= 0), default=-1)
    return text[cut + 1 :] if cut < CONTEXT_CHARACTERS // 4 else text
