"""The corpus of `deduplication.py`: from text files, as many documents as wanted, and copies of known likeness.

In FOLDER: `0.jsonl` … `7.jsonl`, lines of `{"id": n, "text": …}`; document n stands in file n % 8, line n // 8 + 1.
`truth.json` says which documents are changed copies of which, and how alike they are: `jaccard`, the share of their
different runs of 5 tokens that both have, counted for some 20,000 pairs; null for others, which nobody is judged by.

* *Base documents* are of log-normal size, median 2,000 bytes. First the texts as they stand, cut at line ends, without
  lines that were there before; then, to reach any size, short pieces from random places of one file. So two of them
  share some words at a time, never a passage.
* *Copies*, three of ten documents, each of another base document: a share of the words is replaced by others.

Tokens are words in lower case without punctuation; of scripts without spaces, characters. (The package says it too;
what is measured here shall not judge itself.)
"""

from __future__ import annotations

import gzip
import heapq
import json
import random
import unicodedata
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import regex

FILES, COPIES, PAIRS, MEAN_BYTES = 8, 0.3, 20_000, 3300
REPLACED = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
_UNSPACED = r"\p{Hiragana}\p{Katakana}\p{Han}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
TOKEN = regex.compile(rf"(?V1)[{_UNSPACED}]\p{{M}}*|[\w--[{_UNSPACED}]]+")


class Source:
    """The different lines of a text file as one text, and documents of it without end."""

    def __init__(self, path: Path, seen: set[int]):
        lines = []
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
            for line in (line for record in file for line in json.loads(record)["text"].splitlines()):
                if line.strip() and (key := hash(line.strip())) not in seen:
                    seen.add(key)
                    lines.append(line)
        self.text, self.at = "\n".join(lines), 0
        self.num_bytes = len(self.text.encode())
        self.words = TOKEN.findall(self.text[:1_000_000])
        self.unspaced = sum(len(word) == 1 for word in self.words) > len(self.words) / 2

    def document(self, chance: random.Random) -> str:
        """The next one."""
        size = min(max(2000 * chance.lognormvariate(0, 1), 200), 100_000)
        length = int(size * len(self.text) / self.num_bytes)
        start, end = self.at, self.text.find("\n", self.at + length)
        if end >= 0:
            self.at = end + 1
            return self.text[start:end]
        self.at = len(self.text)
        return ("" if self.unspaced else " ").join(self._pieces(length, chance))

    def _pieces(self, length: int, chance: random.Random) -> Iterator[str]:
        while length > 0:
            start = chance.randrange(max(1, len(self.text) - 100))
            start = self.text.find(" ", start, start + 20) + 1 or start
            end = self.text.find(" ", start + 35, start + 60)
            piece = self.text[start : end if end > 0 else start + 30]
            yield piece
            length -= len(piece)

    def changed(self, text: str, share: float, chance: random.Random) -> str:
        """With a share of its words replaced."""
        return TOKEN.sub(lambda found: chance.choice(self.words) if chance.random() < share else found[0], text)


def runs(text: str, size: int = 5) -> set[tuple[str, ...]]:
    """The different runs of tokens."""
    found = TOKEN.findall(unicodedata.normalize("NFC", text).lower())
    return {tuple(found[at : at + size]) for at in range(max(1, len(found) - size + 1))}


def make(folder: Path, texts: list[Path], megabytes: float, seed: int) -> dict[str, Any]:
    """Write the corpus unless it is there; return what truth.json says."""
    truth, settings = folder / "truth.json", {"text": [path.name for path in texts], "MB": megabytes, "seed": seed}
    if truth.exists() and (made := json.loads(truth.read_text(encoding="utf-8")))["settings"] == settings:
        return made
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[int] = set()
    sources = [Source(path, seen) for path in texts]
    made = {"settings": settings, "documents": 0, "bytes": 0, "pairs": []}
    with ExitStack() as stack:
        files = [stack.enter_context(open(folder / f"{n}.jsonl", "w", encoding="utf-8")) for n in range(FILES)]
        for number, (text, pair) in enumerate(_documents(sources, megabytes * 1e6, random.Random(seed))):
            print(json.dumps({"id": number, "text": text}, ensure_ascii=False), file=files[number % FILES])
            made["documents"], made["bytes"] = number + 1, made["bytes"] + len(text.encode())
            made["pairs"] += [{**pair, "copy": number}] if pair else []
    truth.write_text(json.dumps(made), encoding="utf-8")
    return made


def _documents(sources: list[Source], left: float, chance: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """Texts, and of a copy what it is; it comes behind its original, by at most a quarter of the documents."""
    expected, number = left / MEAN_BYTES, 0
    waiting: list[tuple[float, int, str, dict[str, Any]]] = []
    while left > 0 or waiting:
        if waiting and (left <= 0 or waiting[0][0] <= number):
            yield heapq.heappop(waiting)[2:]
        else:
            source = chance.choices(sources, [each.num_bytes for each in sources])[0]
            text = source.document(chance)
            left -= len(text.encode())
            if chance.random() < COPIES / (1 - COPIES):
                pair: dict[str, Any] = {"original": number, "replaced": chance.choice(REPLACED), "jaccard": None}
                copy = source.changed(text, pair["replaced"], chance)
                left -= len(copy.encode())
                if chance.random() < PAIRS / (COPIES * expected):
                    one, other = runs(text), runs(copy)
                    pair |= {"jaccard": len(one & other) / len(one | other), "unspaced": source.unspaced}
                heapq.heappush(waiting, (number + chance.random() * expected / 4, number, copy, pair))
            yield text, {}
        number += 1
