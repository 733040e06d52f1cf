"""Hashes of tokens, lines and n-grams, against the tokens themselves."""

from itertools import chain
from random import Random

import pytest

from zerokara.corpus import token_hashes
from zerokara.corpus.token_hashes import tokens_of, words

TEXTS = [
    "Hello, World! don't\nstop",
    "春の海 終日\nのたりABCかな",
    "",
    "...",
    "a\n\nB a\n",
    "กำลัง ไป หิน्दी हिन्दी में",
    "x" * 700,
    "e\u0301te\u0301 été",
    "a test\0 example \ud800 of any kind",
]


def _distinct(hashes: list[int], names: list[str]) -> None:
    """Equal names have equal hashes, different ones different hashes."""
    assert len(hashes) == len(names)
    of_name = dict(zip(names, hashes, strict=True))
    assert [of_name[name] for name in names] == hashes
    assert len(set(of_name.values())) == len(of_name)


@pytest.mark.parametrize("part", [7, 64, 1 << 18])
def test_each_token_has_a_hash_of_its_own(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(1)
    texts = [*TEXTS, *(" ".join(random.choices(["ab", "ba", "a", "b", "猫", "犬"], k=40)) for _ in range(20))]
    texts = [text for text in texts if part > 700 or not text.startswith("x")]  # a longer word is cut
    monkeypatch.setattr(token_hashes, "_PART", part)
    token_hashes._powers.cache_clear()
    tokens = tokens_of(texts)
    found = [words(text) for text in texts]
    assert tokens.texts.tolist() == [sum(map(len, found[:n])) for n in range(len(texts) + 1)]
    _distinct(tokens.hashes.tolist(), [*chain.from_iterable(found)])
    lines = [" ".join(words(line)) for text in texts for line in text.split("\n")]
    _distinct(tokens.line_hashes().tolist(), lines)
    assert {h for h, line in zip(tokens.line_hashes().tolist(), lines, strict=True) if not line} == {0}
    for size in (2, 5):
        ngrams = [" ".join(each[n : n + size]) for each in found if each for n in range(max(1, len(each) - size + 1))]
        hashes, starts = tokens.ngrams(size)
        _distinct(hashes.tolist(), ngrams)
        assert starts[-1] == len(ngrams)
    token_hashes._powers.cache_clear()


def test_texts_without_tokens() -> None:
    for texts in ([""], ["", "..."]):
        tokens = tokens_of(texts)
        assert tokens.hashes.tolist() == []
        assert tokens.line_hashes().tolist() == [0] * len(texts)
        assert tokens.ngrams(5)[1].tolist() == [0] * (len(texts) + 1)
