"""How many near duplicates step 0 finds, and how many it sees where there are none, by the true Jaccard similarity.

    python -m benchmarks.cleaning.near_duplicates --text pt=pt.jsonl.gz ja=ja.jsonl.gz --documents 20000

For each language: documents cut from the texts, and for 30 % of them a copy that is changed in one of these ways: 0, 2,
5, 10, 20 or 40 % of the words (in scripts without spaces: characters) replaced; shifted (the beginning cut off, as much
put behind it); nested (a part of the original); with boilerplate around. The true similarity of each copy and its
original, and of each document that was dropped and the one that was kept for it, is computed from the sets of all their
n-grams: five words or signs, or characters, in a row.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from zerokara.corpus.compressed import zstd_module
from zerokara.corpus.token_hashes import words

ROOT = Path(__file__).resolve().parents[2]

CHANGES = (0, 0.02, 0.05, 0.1, 0.2, 0.4)
BOILERPLATE = (
    "Home | News | Sport | ホーム | Contato",
    "We use cookies. クッキー",
    "All rights reserved. 無断転載を禁じます",
)
BANDS = (
    (0.95, 1.01),
    (0.9, 0.95),
    (0.85, 0.9),
    (0.8, 0.85),
    (0.75, 0.8),
    (0.7, 0.75),
    (0.65, 0.7),
    (0.6, 0.65),
    (0, 0.6),
)


def documents(path: Path, characters: int) -> Iterator[str]:
    """Yield pieces of the texts of a file, cut at line ends."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as lines:
        for line in lines:
            piece = ""
            for part in json.loads(line)["text"].splitlines(keepends=True):
                piece += part
                if len(piece) > characters:
                    yield piece
                    piece = ""


def changed(text: str, share: float, vocabulary: Sequence[str], randomly: random.Random) -> str:
    """Replace a share of the words, or of the characters."""
    separator = " " if text.count(" ") > len(text) / 20 else ""
    parts = text.split(" ") if separator else list(text)
    return separator.join(randomly.choice(vocabulary) if randomly.random() < share else part for part in parts)


def planted(text: str, vocabulary: Sequence[str], randomly: random.Random) -> tuple[str, str]:
    """A copy of a text, and in which way it was changed."""
    kind = randomly.choice([*(f"{share:.0%} changed" for share in CHANGES), "shifted", "nested", "boilerplate"])
    size = int(len(text) * randomly.uniform(0.02, 0.3))
    if kind == "shifted":
        return text[size:] + " " + " ".join(randomly.choices(vocabulary, k=max(1, size // 6))), kind
    if kind == "nested":
        return text[size // 2 : len(text) - size // 2], kind
    if kind == "boilerplate":
        return "\n".join([*BOILERPLATE[:2], text, BOILERPLATE[2]]), kind
    return changed(text, CHANGES[[f"{share:.0%} changed" for share in CHANGES].index(kind)], vocabulary, randomly), kind


def similarity(first: str, second: str) -> float:
    """The Jaccard similarity of the sets of n-grams."""
    sets = []
    for text in (first, second):
        found = words(text, with_signs=True)
        sets.append({tuple(found[start : start + 5]) for start in range(max(1, len(found) - 4))})
    return len(sets[0] & sets[1]) / max(1, len(sets[0] | sets[1]))


def clean(texts: Sequence[str], folder: Path) -> dict[int, tuple[int, bool]]:
    """Run step 0 on texts: for each that was dropped as a copy, the one that stays for it, and if they are equal."""
    with open(folder / "text.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    settings = {"input": f"[{folder}/text.jsonl]", "output_dir": folder / "clean", "report_only": "false"}
    settings |= {"repeated_lines": 0, "encoding_damage": 0, "evaluation_data": "[]"}
    command = [sys.executable, str(ROOT / "0_clean_corpus.py"), "--config", str(ROOT / "clean_config.yaml")]
    options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    found = {}
    for rule in ("exact", "near"):
        path = folder / "clean" / "dropped" / f"{rule}_duplicates.jsonl.zst"
        with zstd_module().open(path) if path.exists() else io.BytesIO() as records:
            for record in map(json.loads, records):
                found[record["line"] - 1] = record["copy_of"]["line"] - 1, rule == "exact"
    return found


def measure(path: Path, num_documents: int, characters: int, folder: Path) -> None:
    """Plant, clean, and print the tables of one language."""
    randomly = random.Random(1)
    originals = [*dict.fromkeys(islice(documents(path, characters), num_documents))]
    sample = " ".join(originals[:300])
    vocabulary = sample.split() if sample.count(" ") > len(sample) / 20 else [c for c in sample if not c.isspace()]
    chosen = randomly.sample(range(len(originals)), int(len(originals) * 0.3))
    copies = [planted(originals[number], vocabulary, randomly) for number in chosen]
    dropped = clean([*originals, *(text for text, _ in copies)], folder)
    texts = [*originals, *(text for text, _ in copies)]
    by_similarity: dict[tuple[float, float], list[bool]] = defaultdict(list)
    by_kind: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for place, ((text, kind), number) in enumerate(zip(copies, chosen, strict=True), len(originals)):
        value = similarity(originals[number], text)
        by_similarity[next(band for band in BANDS if band[0] <= value < band[1])].append(place in dropped)
        by_kind[kind].append((value, place in dropped))
    print(f"{len(originals):,} documents, {len(copies):,} planted copies")
    for low, high in BANDS:
        if found := by_similarity[low, high]:
            print(f"  true similarity {low:.2f} to {min(high, 1):.2f}: {sum(found):6,} of {len(found):6,} dropped")
    close = [each for (low, _), found in by_similarity.items() if low >= 0.85 for each in found]
    print(f"  recall at 0.85 and above: {sum(close) / len(close):.3%}")
    for kind, pairs in sorted(by_kind.items()):
        mean = sum(value for value, _ in pairs) / len(pairs)
        share = sum(found for _, found in pairs) / len(pairs)
        print(f"  {kind:>12}: similarity {mean:.2f} in the mean, {share:.1%} dropped")
    values = [similarity(texts[copy], texts[original]) for copy, (original, _) in dropped.items()]
    false = sum(value < 0.6 for value in values)
    merges = f"{false:,} of {len(texts):,} documents ({false / len(texts):.4%})"
    print(f"  dropped for one with a true similarity below 0.6: {merges}; least {min(values):.3f}", flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", required=True, metavar="LANGUAGE=FILE")
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--characters", type=int, default=1500, help="of a document, at least")
    options = parser.parse_args()
    for each in options.text:
        language, _, name = each.partition("=")
        print(f"{language}: ", end="")
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(name), options.documents, options.characters, Path(folder))


if __name__ == "__main__":
    main()
