"""nanochat's scripts.base_train in the contest, and the program that starts it there. Nothing of it is changed.

    --nanochat CHECKOUT        git clone https://github.com/karpathy/nanochat

What it is given, so that it has a real chance:

* *Vocabulary.* Its tokenizer.pkl may be any object with tiktoken's methods. Ours (`CharacterIds`) reads one character
  as one token id: the documents were encoded before, with the same SentencePiece model as everybody's.
* *Documents.* Its loader begins every row with a document and throws away what does not fit, which of long documents is
  nearly all. So they are cut into pieces that fill a row exactly, and shuffled: nothing is lost.
* *Size.* Its one dial, the depth, for about as many weights in its layers as the others have; the value embeddings and
  the untied output come on top, as it has them. On a CPU, windows ``L``, as it recommends there itself.
* *Warm-up.* Its 40 steps, or 10 % of the run's where that is fewer: with its own batch some runs have hardly 40.
* *Seed.* It has no option for one: `main` hands it to `torch.manual_seed`, and it shuffles the pieces.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.recipe.contender import Contender, Contest, Corpus, Job, RunFailed, Trained, python, rate, run

FIRST_CHARACTER = 0x10000
"""Stands for token id 0; from here on there are no surrogates, which UTF-8 cannot hold."""
BEGIN = "<|bos|>"
ASPECT = 64
"""Its hidden size for each layer of depth."""
WARMUP_STEPS = 40
"""Its default."""
PIECES_IN_A_GROUP = 1024


@dataclass(frozen=True)
class CharacterIds:
    """The methods of tiktoken's `Encoding` that nanochat calls, on texts in which a character is a token id."""

    n_vocab: int
    bos_id: int

    @property
    def special_tokens_set(self) -> set[str]:
        return {BEGIN}

    def encode_single_token(self, text: str) -> int:
        if text != BEGIN:
            raise KeyError(text)
        return self.bos_id

    def encode_ordinary(self, text: str) -> list[int]:
        return [ord(character) - FIRST_CHARACTER for character in text]

    def encode_ordinary_batch(self, texts: list[str], num_threads: int = 1) -> list[list[int]]:
        return [self.encode_ordinary(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(chr(FIRST_CHARACTER + number) for number in ids)


@dataclass(frozen=True)
class Nanochat(Contender):
    """One set of options."""

    name: str
    explanation: str
    options: dict[str, int]
    """Beside its defaults."""

    def batch_tokens(self, contest: Contest, tokens: int) -> int:
        """Its own rule (scripts/base_train.py), which goes by 12 tokens a weight, not by the run's length."""
        if given := self.options.get("total-batch-size"):
            return given
        depth, vocab = depth_of(contest), contest.corpus.vocab_size
        ratio = _scaling_weights(depth, vocab) / _scaling_weights(12, vocab)
        return int(2 ** round(19 + 0.383 * math.log2(ratio)))

    def train(self, contest: Contest, job: Job) -> Trained:
        if contest.nanochat is None:
            raise RunFailed("--nanochat is not given")
        batch = self.batch_tokens(contest, job.tokens)
        steps, seq_len = job.steps(batch), contest.shape.seq_len
        base = job.folder.resolve() / "base"
        _write_data(contest, job.seed, base)
        options = {"depth": depth_of(contest), "window-pattern": "L", "max-seq-len": seq_len,
                   "device-batch-size": min(32, batch // seq_len), "num-iterations": steps,
                   "warmup-steps": max(1, min(WARMUP_STEPS, steps // 10)), "eval-every": -1,
                   "core-metric-every": -1, "sample-every": -1, "model-tag": "it", **self.options}  # fmt: skip
        arguments = [f"--{key}={value}" for key, value in options.items()]
        dtype = "bfloat16" if contest.precision == "bf16" else "float32"
        command = [*python("nanochat"), job.seed, *arguments]
        environment = {"NANOCHAT_BASE_DIR": str(base), "NANOCHAT_DTYPE": dtype}
        run(contest, job, command, [contest.nanochat.resolve(), contest.peers], **environment)
        log = job.log.read_text(encoding="utf-8")
        if f"Total batch size {batch:,} =>" not in log:
            raise RunFailed(f"its batch is not the {batch:,} tokens that its rule had ({job.log})")
        seconds = [float(found) / 1000 for found in re.findall(r"^step \d+/.* dt: ([\d.]+)ms", log, re.MULTILINE)]
        if len(seconds) != steps:
            raise RunFailed(f"{len(seconds)} of {steps} steps are in {job.log}")
        facts = {
            "depth": depth_of(contest),
            "batch_tokens": batch,
            "warmup_steps": options["warmup-steps"],
            **self.options,
        }
        checkpoint = base / "base_checkpoints" / "it"
        return Trained(steps * batch, steps, rate(batch, seconds), ("nanochat", str(checkpoint)),
                       contest.corpus.bos_id, facts)  # fmt: skip


def depth_of(contest: Contest) -> int:
    """The depth whose layers, 12·depth·(64·depth)² weights, come nearest to those of the contest's shape."""
    shape = contest.shape
    wanted = shape.layers * (4 * shape.hidden_size**2 + 3 * shape.hidden_size * shape.ffn_hidden_size)
    return min(range(1, 65), key=lambda depth: abs(12 * depth * (ASPECT * depth) ** 2 - wanted))


def _scaling_weights(depth: int, vocab_size: int) -> int:
    """Weights of the layers and of the output, by which its rules go; heads of 128 round the width up."""
    width = -(-depth * ASPECT // 128) * 128
    return 12 * depth * width**2 + -(-vocab_size // 64) * 64 * width


def pieces_of(corpus: Corpus, seq_len: int) -> list[Any]:
    """int32[up to S] each: the training documents, cut so that a row holds a begin token and one whole piece."""
    import numpy as np

    ids = np.load(corpus.train_ids)
    documents = [part[part != corpus.eos_id] for part in np.split(ids, np.flatnonzero(ids == corpus.eos_id) + 1)]
    return [document[at : at + seq_len] for document in documents for at in range(0, len(document), seq_len)]


def _write_data(contest: Contest, seed: int, base: Path) -> None:
    """Pieces in parquet, the last file being its validation, and the tokenizer."""
    import pickle

    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch

    corpus, seq_len = contest.corpus, contest.shape.seq_len
    encoder = CharacterIds(corpus.vocab_size, corpus.bos_id)
    texts = [encoder.decode(piece.tolist()) for piece in pieces_of(corpus, seq_len)]
    order = np.random.default_rng(seed).permutation(len(texts))
    folder = base / "base_data_climbmix"
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table({"text": [texts[number] for number in order]})
    pq.write_table(table, folder / "shard_00000.parquet", row_group_size=PIECES_IN_A_GROUP)
    pq.write_table(table.slice(0, 1), folder / "shard_00001.parquet")
    tokenizer = base / "tokenizer"
    tokenizer.mkdir(exist_ok=True)
    (tokenizer / "tokenizer.pkl").write_bytes(pickle.dumps(encoder))
    torch.save(torch.ones(corpus.vocab_size, dtype=torch.int32), tokenizer / "token_bytes.pt")  # of its own evaluation


NANOCHAT = (
    Nanochat("nanochat", "base_train with all its own rules at that depth, batch included", {}),
    Nanochat(
        "nanochat-runcpu",
        "with the batch and head size of its runs/runcpu.sh",
        {"total-batch-size": 16384, "head-dim": 64},
    ),
)


def main() -> None:
    """Start base_train: ``python -m benchmarks.recipe.nanochat SEED OPTIONS``, its checkout being on PYTHONPATH."""
    import runpy

    import torch

    seed, sys.argv = int(sys.argv[1]), ["base_train", *sys.argv[2:]]
    manual_seed = torch.manual_seed

    def seeded(_: Any) -> torch.Generator:
        return manual_seed(seed)

    torch.manual_seed = seeded  # type: ignore[assignment]  # it asks for 42, and has no option
    runpy.run_module("scripts.base_train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
