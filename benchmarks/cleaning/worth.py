"""What `0_clean_corpus.py` is worth: the same model, trained for the same tokens on dirty text and on what it leaves.

    python -m benchmarks.cleaning.worth OUT --text pt.jsonl [more.jsonl.gz …] [--seeds 1 2 3] [--arms dirty cleaned]

The texts, of one language, are cut at line ends into documents of some 2,000 characters. First 5 % of these are held
out, and step 0 drops what resembles them or another one, so that no arm has near copies of the held-out text. Then the
others are made dirty (`dirty_text.py`), as the web is:

* 30 % of the documents are copies, 0 to 5 % of whose words are replaced. The n-th document has copies in proportion to
  1 / n: a few have many.
* 70 % come from one of 15 sites, which puts a menu and a footer around them, and mostly a notice or "read also", all of
  words of the text; a copy comes from the site of its original, or as often from any.
* 1 % were decoded wrongly.

Arms are `dirty`; `cleaned`, what step 0 leaves of it, with its defaults; `cleaned_twice`, what it leaves of that; and
`undamaged`, what the dirty text was made of. One tokenizer serves all, and equal tokens take equal time. Bits per byte
are step 8's, of the held-out text, and ± is the standard error of the mean difference, over the seeds. Steps skip what
is done: a run that was stopped goes on, and arms and seeds may be added.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterator
from functools import cache
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.cleaning.dirty_text import made_dirty
from benchmarks.recipe.new_language import step
from zerokara.corpus.compressed import zstd_module

CHARACTERS, HELD_OUT = 2000, 0.05


def pieces(path: Path) -> Iterator[str]:
    """Documents of `CHARACTERS`, cut at line ends; what is left of a text if it is half as long."""
    for record in records(path):
        piece = ""
        for line in record["text"].split("\n"):
            piece += line + "\n"
            if len(piece) >= CHARACTERS:
                yield piece.strip()
                piece = ""
        if len(piece) >= CHARACTERS / 2:
            yield piece.strip()


@cache
def records(path: Path) -> list[dict[str, Any]]:
    """The documents of a file, or of the files in a folder."""
    if path.is_dir():
        return [record for each in sorted(path.iterdir()) for record in records(each)]
    with {".gz": gzip.open, ".zst": zstd_module().open}.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def as_planted(record: dict[str, Any]) -> dict[str, Any]:
    """The document of the dirty text that was cleaned, once or more."""
    while "line" in record:
        record = records(Path(record["source"]))[record["line"] - 1]
    return record


def write(path: Path, documents: list[dict[str, Any]]) -> None:
    """Write documents as JSON lines."""
    path.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in documents), encoding="utf-8")


def clean(out: Path, text: Path, name: str) -> Path:
    """Clean a text by step 0; return where the clean text is."""
    texts = {"input": f"[{text}]", "evaluation_data": f"[{out}/held_out.jsonl]"}
    step("clean_corpus", **texts, output_dir=out / name, report_only=False)
    return out / name / "text"


def prepare(out: Path, texts: list[Path], megabytes: float, arms: list[str]) -> dict[str, Path]:
    """The text of each arm."""
    chance = random.Random(1)
    if not (out / "dirty.jsonl").exists():
        out.mkdir(parents=True, exist_ok=True)
        found = [{"text": piece} for path in texts for piece in pieces(path)]
        chance.shuffle(found)
        number = int(len(found) * min(1, megabytes * 1e6 / sum(len(each["text"].encode()) for each in found)))
        held_out = int(HELD_OUT * number)
        write(out / "held_out.jsonl", found[:held_out])
        write(out / "others.jsonl", found[held_out:number])
        texts_left = [record["text"] for record in records(clean(out, out / "others.jsonl", "undamaged"))]
        chance.shuffle(texts_left)
        documents, lines = made_dirty(texts_left, chance)
        (out / "lines.json").write_text(json.dumps(lines), encoding="utf-8")
        write(out / "dirty.jsonl", documents)
    paths = {"dirty": out / "dirty.jsonl", "cleaned": clean(out, out / "dirty.jsonl", "cleaned")}
    if "cleaned_twice" in arms:
        paths["cleaned_twice"] = clean(out, paths["cleaned"], "cleaned_twice")
    return paths | {"undamaged": out / "undamaged" / "text"}


def contents(out: Path, paths: dict[str, Path]) -> Iterator[str]:
    """What is in the dirty text, and what cleaning leaves of it."""
    lines = {*json.loads((out / "lines.json").read_text(encoding="utf-8"))}
    yield "| | documents | MB | copies | lines of sites | decoded wrongly |\n|---|---:|---:|---:|---:|---:|"
    for arm in [each for each in paths if each != "undamaged"]:
        some = records(paths[arm])
        whole = [*map(as_planted, some)]
        added = sum(len(line.encode()) for each in some for line in each["text"].split("\n") if line in lines)
        copies, damaged = len(whole) - len({each["of"] for each in whole}), sum(each["damaged"] for each in whole)
        size = sum(len(each["text"].encode()) for each in some) / 1e6
        yield f"| {arm} | {len(some):,} | {size:.2f} | {copies:,} | {added / 1e6:.2f} MB | {damaged} |"
    [tally] = json.loads((out / "cleaned" / "report.json").read_text(encoding="utf-8"))["sources"].values()
    rules = [name for name in tally if name not in ("read", "text", "unreadable")]
    shares = (f"{name} {tally[name]['bytes'] / tally['read']['bytes']:.1%}" for name in rules)
    yield f"\ndropped, of the bytes: {', '.join(shares)}\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--megabytes", type=float, default=5, help="of text, the held-out text among them")
    parser.add_argument("--arms", nargs="+", default=["dirty", "cleaned"], metavar="ARM")
    parser.add_argument("--seeds", nargs="+", default=["1", "2", "3"], metavar="SEED")
    parser.add_argument("--size", default="1M")
    parser.add_argument("--vocab-size", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=3_000_000)
    given = parser.parse_args()
    out = given.out.resolve()
    paths = prepare(out, given.text, given.megabytes, given.arms)
    print("\n".join(contents(out, paths)), flush=True)
    step("train_tokenizer", input=f"[{paths['cleaned']}]", output_dir=out / "tokenizer", vocab_size=given.vocab_size)
    runs = [(arm, seed, out / f"{arm}_{seed}") for seed in given.seeds for arm in given.arms]
    for arm, seed, run in runs:
        settings = {
            "input_jsonl": f"[{paths[arm]}]", "output_prefix": out / f"{arm}_tokens", "valid_fraction": 0,
            "input_tokenizer_file": out / "tokenizer" / "tokenizer.model", "output_model_dir": run,
            "model_size": given.size, "train_tokens": given.tokens, "max_epochs_per_source": 16, "num_processes": 1,
            "sample_prompts": "[]", "eval_interval": 100_000, "save_interval": 100_000, "seed": seed,
        }  # fmt: skip
        step("tokenize", **settings)
        step("train", **settings)
        exported = {"input_model_dir": run, "output_tokenizer_and_model_dir": f"{run}_hf"}
        step("convert_to_hf", **exported, language="[mul]")
    folders = ", ".join(f"{run}_hf" for _, _, run in runs)
    texts = {"models": f"[{folders}]", "texts": f"[{out}/held_out.jsonl]", "tasks": "[]"}
    step("evaluate", "--redo", **texts, output_dir=out / "evaluation")
    rows = json.loads((out / "evaluation" / "results.json").read_text(encoding="utf-8"))["sections"][0]["rows"]
    bits = {row["model"]: row["value"] for row in rows}
    print("\n".join(table(runs, bits, given.arms)))


def table(runs: list[tuple[str, str, Path]], bits: dict[str, float], arms: list[str]) -> Iterator[str]:
    """Bits per byte by seed; of each other arm, by how much it differs from the first one with the same seed."""
    values = {arm: [bits[f"{run.name}_hf"] for each, _, run in runs if each == arm] for arm in arms}
    seconds = {arm: [seconds_of(run) for each, _, run in runs if each == arm] for arm in arms}
    seeds = list(dict.fromkeys(seed for _, seed, _ in runs))
    yield f"| bits per byte | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | − {arms[0]} | seconds |"
    yield f"|---|{'---:|' * (len(seeds) + 3)}"
    for arm, its in values.items():
        differences = [value - other for value, other in zip(its, values[arms[0]], strict=True)]
        error = stdev(differences) / sqrt(len(seeds)) if len(seeds) > 1 else float("nan")
        cells = [*(f"{value:.4f}" for value in its), f"{fmean(its):.4f}", f"{fmean(differences):+.4f} ± {error:.4f}"]
        yield f"| {arm} | {' | '.join(cells)} | {fmean(seconds[arm]):.0f} |"


def seconds_of(run: Path) -> float:
    """Seconds of a training."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return float(max(line.get("seconds", 0) for line in lines))


if __name__ == "__main__":
    main()
