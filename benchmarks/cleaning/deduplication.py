r"""How fast are duplicates found, in how much memory, and which, beside what a user would pick instead?

    python -m benchmarks.cleaning.deduplication FOLDER --text FILE.jsonl[.gz] … --peers PEERS/bin/python \
        [--megabytes 1200]

In turn, in every round, on the same corpus (`planted_copies.py` makes it in FOLDER/corpus), whole commands on the
cores that this process may use, from text to written text:

* ``ours``: `0_clean_corpus.py`, near duplicates from 0.8 on.
* ``datatrove``: its MinHash, in four stages (`datatrove_minhash.py` says how), of words as `\w+` finds them; so a
  sentence in Japanese or Thai is one word, and ``datatrove-characters`` the same with characters as words there.
* ``text-dedup``: its `minhash`, threshold 0.8, runs of 5 words, else as it comes.

Prints medians: seconds, and the peak memory of all processes together, pages that several share counted once (PSS; the
sum of RSS where the system does not tell). *Found* are planted pairs of which one or both were dropped, by true
Jaccard, in texts with and without spaces between words. *False merges* are dropped documents that resemble no planted
one by 0.6, *lost* are pairs of which both were dropped. The peers want an environment of their own:

    python3 -m venv PEERS
    PEERS/bin/pip install 'datatrove[io,processing]==0.10.1' scipy click-option-group rich psutil
    PEERS/bin/pip install --no-deps text-dedup==0.4.0    # its minhash imports nothing else of what it declares
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.ipc

from benchmarks.cleaning.planted_copies import FILES, TOKEN, make
from zerokara.corpus.compressed import zstd_module

ROOT = Path(__file__).resolve().parents[2]

SAMPLE_SECONDS = 0.25
CLASSES = ((1, 2, "equal"), (0.85, 1, "0.85–1"), (0.8, 0.85, "0.8–0.85"), (0.7, 0.8, "0.7–0.8"), (0.6, 0.7, "0.6–0.7"),
           (0, 0.6, "under 0.6"))  # fmt: skip


def command(contender: str, corpus: Path, out: Path, workers: int, peers: str) -> list[str]:
    """What is run, in the folder `out`."""
    if contender.startswith("datatrove"):
        pattern = TOKEN.pattern if contender.endswith("characters") else r"\w+"
        program = Path(__file__).with_name("datatrove_minhash.py")
        return [peers, str(program), str(corpus), str(out), str(workers), pattern]
    if contender == "text-dedup":
        given = f"--path json --split train --column text --threshold 0.8 --ngram 5 --num_proc {workers}".split()
        where = ["--data_files", f"{corpus}/*.jsonl", "--cache_dir", f"{out}/cache", "--output", f"{out}/kept"]
        return [peers, "-m", "text_dedup.minhash", *given, *where]
    values = {"input": [str(path) for path in sorted(corpus.glob("*.jsonl"))], "output_dir": str(out / "cleaned"),
              "report_only": False, "near_duplicates": 0.8, "num_workers": workers, "evaluation_data": []}  # fmt: skip
    (out / "clean.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items()))
    return [sys.executable, str(ROOT / "0_clean_corpus.py"), "--config", str(out / "clean.yaml")]


def dropped_by(contender: str, out: Path, num_documents: int) -> set[int]:
    """Numbers of the documents that are not in the output."""
    if contender == "text-dedup":
        dropped = set(range(num_documents))
        for path in (out / "kept").glob("*.arrow"):
            with pyarrow.ipc.open_stream(path) as batches:
                dropped.difference_update(number for batch in batches for number in batch.column("id").to_pylist())
        return dropped
    if contender.startswith("datatrove"):
        return {int(each["id"]) for each in _records(out / "dropped", "*.zst")}
    found = _records(out / "cleaned" / "dropped", "*_duplicates.jsonl.zst")
    return {(each["line"] - 1) * FILES + int(Path(each["source"]).stem) for each in found}


def _records(folder: Path, pattern: str) -> Iterator[dict[str, Any]]:
    for path in folder.glob(pattern):
        with zstd_module().open(path, "rt", encoding="utf-8") as file:
            yield from map(json.loads, file)


def measure(words: list[str], out: Path) -> dict[str, float]:
    """Run a command: its seconds, and the peak memory of all its processes."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"HF_HOME": str(out / "cache"), "HF_HUB_OFFLINE": "1"}
    ended, sizes = threading.Event(), [0]
    started = time.perf_counter()
    with (
        open(out / "log.txt", "wb") as log,
        subprocess.Popen(words, stdout=log, stderr=log, env=env, cwd=out) as process,
    ):
        sampler = threading.Thread(target=_sample, args=(process.pid, sizes, ended))
        sampler.start()
        code = process.wait()
        seconds = time.perf_counter() - started
        ended.set()
        sampler.join()
    if code:
        raise SystemExit(f"{' '.join(words)} ended with {code}; see {out / 'log.txt'}")
    return {"seconds": seconds, "peak MB": max(sizes) / 1e6}


def _sample(pid: int, sizes: list[int], ended: threading.Event) -> None:
    while not sizes[1:] or not ended.wait(SAMPLE_SECONDS):
        size = 0
        try:
            for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                try:
                    size += process.memory_full_info().pss
                except (psutil.AccessDenied, AttributeError):
                    size += process.memory_info().rss
        except psutil.Error:
            pass  # one has just ended: what was seen until then counts
        sizes.append(size)


def judged(dropped: set[int], truth: dict[str, Any]) -> dict[str, float]:
    """What was found and what was dropped without reason, in per cent."""
    alike = [pair for pair in truth["pairs"] if pair["jaccard"] is None or pair["jaccard"] >= 0.6]
    members = {number for pair in alike for number in (pair["original"], pair["copy"])}
    rows = {
        "dropped": len(dropped),
        "false merges, %": 100 * len(dropped - members) / (truth["documents"] - len(members)),
        "lost pairs, %": 100 * sum({pair["original"], pair["copy"]} <= dropped for pair in alike) / len(alike),
    }
    for least, below, name in CLASSES:
        for kind in (False, True):
            pairs = [
                (pair["original"] in dropped) | (pair["copy"] in dropped)
                for pair in truth["pairs"]
                if pair["jaccard"] is not None and least <= pair["jaccard"] < below and pair["unspaced"] == kind
            ]
            if pairs:
                rows[f"found of {len(pairs):,} {name} with{'out' * kind} spaces, %"] = 100 * sum(pairs) / len(pairs)
    return rows


def report(results: dict[str, list[dict[str, float]]]) -> Iterator[str]:
    """The table in Markdown: medians; ratios are taken within each round."""
    yield f"| | {' | '.join(results)} |"
    yield f"|---|{'---:|' * len(results)}"
    first = next(iter(results.values()))
    for row in first[0]:
        middle = [statistics.median(run[row] for run in runs) for runs in results.values()]
        yield f"| {row} | {' | '.join(f'{value:,.1f}' if value % 1 else f'{value:,.0f}' for value in middle)} |"
        if row in ("seconds", "peak MB"):
            pairs = [zip(runs, first, strict=True) for runs in results.values()]
            ratios = [statistics.median(run[row] / own[row] for run, own in each) for each in pairs]
            yield f"| {row} ÷ {next(iter(results))} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--peers", default=sys.executable, metavar="PEERS/bin/python")
    parser.add_argument(
        "--only", nargs="+", default=["ours", "datatrove", "datatrove-characters", "text-dedup"], metavar="CONTENDER"
    )
    parser.add_argument("--megabytes", type=float, default=1200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    folder, workers = given.folder.resolve(), given.workers
    truth = make(folder / "corpus", given.text, given.megabytes, given.seed)
    size = f"{truth['documents']:,} documents, {truth['bytes'] / 1e6:,.1f} MB"
    print(f"{size}, {len(truth['pairs']):,} of them copies; {workers} workers\n", flush=True)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in given.only}
    for _ in range(given.rounds):
        for name, runs in results.items():
            out = folder / name
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            runs.append(measure(command(name, folder / "corpus", out, workers, given.peers), out))
            runs[-1].update(judged(dropped_by(name, out, truth["documents"]), truth))
            (folder / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print("\n".join(report(results)))


if __name__ == "__main__":
    main()
