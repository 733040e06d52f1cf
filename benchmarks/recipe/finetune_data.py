"""Examples of four tasks, and the text that their model learned before, for `finetune.py`.

| task | an example | metric |
|---|---|---|
| sentiment | a Korean film review, and whether it is positive (NSMC) | accuracy |
| kinds | the beginning of a Romanian text, and whether it is a law, a novel or news | accuracy |
| pairs | a Romanian sentence without its diacritics, and the sentence | loss, words that are right |
| chats | two turns: a sentence of a novel, and the sentence behind it | loss |

All are at most `MAX_CHARACTERS` a text, so that twenty thousand take minutes. Training examples are drawn by a seed;
those of validation and test are the same for all.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

METRICS = {"sentiment": "accuracy", "kinds": "accuracy", "pairs": "loss", "chats": "loss"}
TESTED = {"pairs": "word_accuracy"}
"""Metric of the answers to the test examples, beside the loss, by which checkpoints are chosen."""
MAX_CHARACTERS = 80
NUM_VALID, NUM_TEST = 200, 1000
BASE = (("ro_eltec.jsonl.gz", 700), ("ro_rosts.jsonl", 8000), ("ro_laws.jsonl", 250), ("ko_nsmc_reviews.jsonl.gz", 900))
"""Files, and the number of their first documents, that the base model reads; the examples come from the others."""
_SENTENCE = re.compile(r"[^.!?…\n]{15,}[.!?…]")

Example = dict[str, Any]


def write_base(corpora: Path, path: Path) -> None:
    """Write the text of the base model."""
    with open(path, "w", encoding="utf-8") as file:
        for name, number in BASE:
            file.writelines(json.dumps({"text": text}) + "\n" for text in islice(_texts(corpora / name), number))


def write_examples(corpora: Path, folder: Path, task: str, number: int, seed: int) -> dict[str, Path]:
    """Write `number` training examples of a task; return the files of the three splits."""
    held_out, others = _examples(corpora, task)
    drawn = random.Random(seed).sample(others, number)
    splits = {
        f"train_{number}_{seed}": drawn, "valid": held_out[:NUM_VALID], "test": held_out[NUM_VALID:]
    }  # fmt: skip
    paths = {}
    for name, examples in splits.items():
        paths[name.partition("_")[0]] = path = folder / f"{task}_{name}.jsonl"
        if not path.exists():  # whole at once, for others that read it
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text("".join(json.dumps(example) + "\n" for example in examples), encoding="utf-8")
            partial.rename(path)
    return paths


@cache
def _examples(corpora: Path, task: str) -> tuple[list[Example], list[Example]]:
    """Examples that are held out, and the others, in a fixed random order, each input once."""
    makers = {"sentiment": _reviews, "kinds": _kinds, "pairs": _pairs, "chats": _chats}
    examples = list({json.dumps(next(iter(example.values()))): example for example in makers[task](corpora)}.values())
    random.Random(0).shuffle(examples)
    return examples[: NUM_VALID + NUM_TEST], examples[NUM_VALID + NUM_TEST :]


def _reviews(corpora: Path) -> Iterator[Example]:
    with gzip.open(corpora / "nsmc_ratings_train.txt.gz", "rt", encoding="utf-8") as lines:
        for line in islice(lines, 1, 40_000):
            _, text, label = line.rstrip("\n").split("\t")
            if 5 < len(text) < MAX_CHARACTERS / 2:  # a character of Korean is half a word
                yield {"text": text, "label": "긍정" if label == "1" else "부정"}


def _kinds(corpora: Path) -> Iterator[Example]:
    for label, (name, number) in zip(("roman", "știre", "lege"), BASE[:3], strict=True):
        texts = islice(_texts(corpora / name), number, None)
        sentences = (sentence for text in texts for sentence in _sentences(text))
        yield from ({"text": sentence, "label": label} for sentence in islice(sentences, 14_000))


def _pairs(corpora: Path) -> Iterator[Example]:
    with gzip.open(corpora / "ro_diacritics_train.jsonl.gz", "rt", encoding="utf-8") as lines:
        pairs = (json.loads(line) for line in lines)
        yield from islice((pair for pair in pairs if 15 < len(pair["source"]) < MAX_CHARACTERS), 40_000)


def _chats(corpora: Path) -> Iterator[Example]:
    for text in islice(_texts(corpora / BASE[0][0]), BASE[0][1], None):
        sentences = _sentences(text)
        for first in range(0, len(sentences) - 3, 4):
            turns = zip(("user", "assistant") * 2, sentences[first : first + 4], strict=True)
            yield {"messages": [{"role": role, "content": sentence} for role, sentence in turns]}


def _sentences(text: str) -> list[str]:
    return [found.strip() for found in _SENTENCE.findall(text) if len(found) < MAX_CHARACTERS]


def _texts(path: Path) -> Iterator[str]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]
