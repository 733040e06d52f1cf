"""How fast does step 2 turn text into token files, beside what a user would pick instead?

    python -m benchmarks.tokenizing --model TOKENIZER.model CORPUS.jsonl [--rounds 5] [--workers 2] [--quick]

In turn, in every round, on the same documents, with as many processes or threads (MB are 10^6 bytes of UTF-8 text):

* ``ours``: `2_tokenize.sh` as a user runs it, from the start of the command to the end: reading and checking JSON
  lines, ids, both splits, index, hashes, manifest. ``ours, encoding`` leaves out the start of Python, the preparation
  and the joining of the shards, as the step itself reports it (the start of the workers is in it).
* ``bare encoder``: the encoder that ours chose (SentencePiece, or the fast encoder) and nothing else: each process has
  its half of the documents as Python strings in memory, loads the model, waits for the others, and encodes whole
  documents in its quickest way (64 at once, ids as arrays). Nothing is read, checked or written.
* ``bare sentencepiece``: the same with SentencePiece, where ours chose another.
* ``tokenizers``: Hugging Face's `encode_batch` on the tokenizer.json of our export; strings in memory, ids only.
* ``pool and one writer``: as Megatron-LM's preprocess_data.py does it: a pool of processes parses and encodes single
  lines, sends the ids back, one process writes the .bin.

Prints the median of each and its ratio to ours, taken within each round. The ids of ours are compared with those of
SentencePiece, line by line, on the whole corpus.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from zerokara.base import manifest
from zerokara.huggingface import tokenizer_json
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.fast_encoder import FastEncoder, choose
from zerokara.tokens.indexed import IndexedTokens, TokenPaths

ROOT = Path(__file__).resolve().parents[1]

BATCH = 64
CHUNK_LINES = 32
"""Lines that the pool hands to a process at once, as in preprocess_data.py."""


def ours(corpus: Path, model: Path, workers: int, folder: Path) -> tuple[float, manifest.Manifest]:
    """Seconds of the whole command, and what it recorded."""
    config = folder / "config.yaml"
    prefix = folder / "tokens"
    values = {
        "input_jsonl": [str(corpus)],
        "input_tokenizer_file": str(model),
        "output_prefix": str(prefix),
        "num_workers": workers,
        "valid_min_documents": 1,
    }
    config.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items()), encoding="utf-8")
    command = ["bash", str(ROOT / "2_tokenize.sh"), "--config", str(config), "--redo"]
    started = time.perf_counter()
    # As for any user, Python keeps what it has compiled; some images forbid it, and then every start compiles anew.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    return time.perf_counter() - started, manifest.read(TokenPaths(str(prefix)).manifest)


def bare(open_encode: Callable[[], Callable[[list[str]], Any]], texts: list[str], workers: int) -> float:
    """Seconds of encoding alone, in `workers` processes that begin together."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(workers + 1)
    processes = [
        context.Process(target=_encode_share, args=(open_encode, texts[number::workers], barrier))
        for number in range(workers)
    ]
    for process in processes:
        process.start()
    barrier.wait()
    started = time.perf_counter()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return time.perf_counter() - started


def _encode_share(open_encode: Callable[[], Callable[[list[str]], Any]], texts: list[str], barrier: Barrier) -> None:
    encode = open_encode()
    barrier.wait()
    for start in range(0, len(texts), BATCH):
        encode(texts[start : start + BATCH])
    os._exit(0)  # what a process does when it ends is not measured


def _sentencepiece(model: Path) -> Callable[[list[str]], Any]:
    processor = Encoder(model)._processor
    return lambda texts: processor.EncodeAsNumpy(texts, num_threads=1)


def _chosen(encoder: Encoder | FastEncoder) -> Callable[[list[str]], Any]:
    return encoder.encode_joined if isinstance(encoder, FastEncoder) else _sentencepiece(encoder.model_path)


def hugging_face(tokenizer_json: Path, texts: list[str], workers: int) -> float:
    """Seconds of `encode_batch`, in a process of its own, since its threads are set once for a process."""
    program = (
        "import sys, time, json\nfrom tokenizers import Tokenizer\n"
        "tokenizer = Tokenizer.from_file(sys.argv[1])\ntokenizer.encode_special_tokens = True\n"
        "texts = json.load(sys.stdin)\nstarted = time.perf_counter()\n"
        f"for i in range(0, len(texts), {BATCH}):\n"
        f"    [encoded.ids for encoded in tokenizer.encode_batch(texts[i:i+{BATCH}], add_special_tokens=False)]\n"
        "print(time.perf_counter() - started)\n"
    )
    env = {**os.environ, "RAYON_NUM_THREADS": str(workers), "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, "-c", program, str(tokenizer_json)]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=True, env=env)
    return float(done.stdout)


_processor: Any = None


def _open_pool_encoder(model: Path) -> None:
    global _processor
    import sentencepiece

    _processor = sentencepiece.SentencePieceProcessor(model_file=str(model))


def _encode_line(line: str) -> list[int]:
    return [*_processor.encode(json.loads(line)["text"]), _processor.eos_id()]


def pool_and_one_writer(corpus: Path, model: Path, workers: int, folder: Path) -> float:
    """Seconds from the start of the pool to the closed .bin."""
    started = time.perf_counter()
    context = multiprocessing.get_context("fork")
    lengths = []
    with (
        open(corpus, encoding="utf-8") as lines,
        open(folder / "pool.bin", "wb") as file,
        context.Pool(workers, _open_pool_encoder, (model,)) as pool,
    ):
        for ids in pool.imap(_encode_line, lines, CHUNK_LINES):
            file.write(np.array(ids, dtype=np.uint16).tobytes())
            lengths.append(len(ids))
    return time.perf_counter() - started


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, metavar="CORPUS.jsonl")
    parser.add_argument("--model", type=Path, required=True, metavar="TOKENIZER.model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="ours and the bare encoder only, for a large corpus")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    with open(given.corpus, "rb") as file:
        texts = [orjson.loads(line)["text"] for line in file]
    size = sum(len(text.encode()) for text in texts) / 1e6
    encoder = Encoder(given.model)
    choice = choose(encoder, texts[:: max(1, len(texts) // 100)])
    print(
        f"{given.corpus.name}: {len(texts):,} documents, {size:.1f} MB; {given.workers} workers; ours by {choice.name}"
    )
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer_json.write(encoder, folder, 2048)
        runs: dict[str, Callable[[], float]] = {
            "bare encoder": lambda: bare(partial(_chosen, choice.encoder), texts, given.workers),
            "bare sentencepiece": lambda: bare(partial(_sentencepiece, given.model), texts, given.workers),
            "tokenizers": lambda: hugging_face(folder / "tokenizer.json", texts, given.workers),
            "pool and one writer": lambda: pool_and_one_writer(given.corpus, given.model, given.workers, folder),
        }
        if given.quick:
            runs = {what: run for what, run in runs.items() if what == "bare encoder"}
        for number in range(given.rounds):
            whole, made = ours(given.corpus, given.model, given.workers, folder)
            seconds.setdefault("ours", []).append(whole)
            encoding = made.facts["text_bytes"] / made.facts["text_bytes_per_second"]
            seconds.setdefault("ours, encoding", []).append(encoding)
            for what, run in runs.items():
                if what == "tokenizers" and number >= 2:
                    continue  # the slowest, and steady
                seconds.setdefault(what, []).append(run())
        different = different_documents(folder, encoder, texts)
    report(seconds, size)
    print(f"  ids: {len(texts):,} documents compared with SentencePiece line by line, {different} different")


def different_documents(folder: Path, encoder: Encoder, texts: list[str]) -> int:
    """Documents whose ids in ours' files are not those of their lines, each encoded by SentencePiece by itself."""
    paths = TokenPaths(str(folder / "tokens"))
    splits = [IndexedTokens(prefix) for prefix in (paths.train, paths.valid)]
    written = [{tokens[i].astype(np.int32).tobytes() for i in range(len(tokens))} for tokens in splits]
    end = np.int32(encoder.eos_id).tobytes()
    different = 0
    for text in texts:
        lines = [encoder._processor.EncodeAsNumpy(line).tobytes() for line in text.split("\n")]
        ids = np.int32(encoder.newline_id).tobytes().join(lines) + end
        different += not any(ids in split for split in written)
    return different


def report(seconds: dict[str, list[float]], size: float) -> None:
    """The table: medians, and ratios taken within each round."""
    for what, times in seconds.items():
        ratios = [
            statistics.median(other / mine for other, mine in zip(times, seconds[ours], strict=False))
            for ours in ("ours", "ours, encoding")
        ]
        rate = size / statistics.median(times)
        print(f"  {what:<20} {rate:7.1f} MB/s   ours is {ratios[0]:.2f} times as fast, its encoding {ratios[1]:.2f}")


if __name__ == "__main__":
    main()
