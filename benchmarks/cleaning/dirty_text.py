"""The dirty corpus of `worth.py`, from clean documents of one language; its head says how it is dirty."""

from __future__ import annotations

import random
from typing import Any

from benchmarks.cleaning.planted_copies import TOKEN

COPIES, REPLACED, ON_SITES, NUM_SITES, MOJIBAKE = 0.3, 0.05, 0.7, 15, 0.01
_ASIDE = 40
"""Documents that are not in the corpus, but give the words of sites and of changes."""


class Site:
    """What a site puts around its pages, of the words of a text."""

    def __init__(self, text: str, chance: random.Random):
        self._chance, self._text, self._words = chance, text, list(TOKEN.finditer(text))
        self._menu, self._notice, self._footer = self._lines(8, 10), self._lines(1, 220), self._lines(3, 40)
        self._read_also, self._titles = self._lines(1, 10), self._lines(12, 45)
        self.lines = [*self._menu, *self._notice, *self._footer, *self._read_also, *self._titles]

    def _lines(self, number: int, characters: int) -> list[str]:
        starts = [word.start() for word in self._chance.sample(self._words[:-300], number)]
        ends = [next(word.end() for word in self._words if word.end() >= start + characters) for start in starts]
        return [" ".join(self._text[start:end].split()) for start, end in zip(starts, ends, strict=True)]

    def page(self, text: str) -> str:
        """A text as it stands there."""
        notice = self._notice if self._chance.random() < 0.5 else []
        read_also = self._read_also + self._chance.sample(self._titles, 4) if self._chance.random() < 0.7 else []
        return "\n".join([*self._menu, *notice, text, *read_also, *self._footer])


def made_dirty(texts: list[str], chance: random.Random) -> tuple[list[dict[str, Any]], list[str]]:
    """The documents, each with the number `of` its original and whether it is `damaged`, and all lines of the sites."""
    aside, texts = "\n".join(texts[:_ASIDE]), texts[_ASIDE:]
    words, sites = TOKEN.findall(aside), [Site(aside, chance) for _ in range(NUM_SITES)]

    def any_site() -> Site | None:
        return chance.choice(sites) if chance.random() < ON_SITES else None

    found = [(number, text, any_site()) for number, text in enumerate(texts)]
    weights, num_copies = [1 / (number + 1) for number in range(len(texts))], len(texts) * COPIES / (1 - COPIES)
    for number, text, site in chance.choices(found, weights, k=round(num_copies)):
        share = chance.uniform(0, REPLACED)
        copy = TOKEN.sub(lambda word, share=share: chance.choice(words) if chance.random() < share else word[0], text)
        found.append((number, copy, site if chance.random() < 0.5 else any_site()))
    chance.shuffle(found)
    documents = []
    for number, text, site in found:
        page, damaged = site.page(text) if site else text, chance.random() < MOJIBAKE
        text = page.encode().decode("cp1252", "replace") if damaged else page
        documents.append({"text": text, "of": number, "damaged": damaged})
    return documents, [line for site in sites for line in site.lines]
