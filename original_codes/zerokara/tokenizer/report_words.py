"""Words of a text, by which tokens per word (fertility) is counted.

A word is what white space separates, punctuation included: nothing needs to be installed for that, and papers that
publish fertilities count so too. Text in scripts that are written without spaces has no such words: it counts only
where an analyser finds its morphemes (`pre_segment`), else its fertility is n/a.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from zerokara.tokenizer.morphemes import Analyser

MAX_UNSPACED_SHARE = 0.1
"""Share of the characters in scripts without spaces up to which white space is taken to separate words; names and
quotations of another language are found everywhere."""
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao; Tibetan; Burmese; Khmer
    "\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"  # Han
)
_KANA = re.compile("[\u3040-\u30ff]")


def count_words(texts: Sequence[str], analyser: Analyser | None = None) -> int | None:
    """Number of words in the texts; None where they cannot be told apart."""
    words, characters, unspaced, kana = 0, 0, 0, 0
    for text in texts:
        found = text.split()
        words += len(found)
        characters += sum(map(len, found))
        unspaced += len(_UNSPACED.findall(text))
        kana += len(_KANA.findall(text))
    if unspaced <= MAX_UNSPACED_SHARE * characters:
        return words
    if analyser is None or analyser.language != "ja" or kana < MAX_UNSPACED_SHARE * unspaced:
        return None
    analyse = analyser.start()
    return sum(sum(1 for _ in analyse(line)) for text in texts for line in text.split("\n") if line.strip())


def word_text(analyser: Analyser | None = None) -> str:
    """What `count_words` counts, to be read."""
    if analyser is None or analyser.language != "ja":
        return "what white space separates"
    return f"what white space separates, and in Japanese text a morpheme as {analyser.version_text()} finds them"
