"""litgpt's pretraining in the contest, and the program that calls `litgpt.pretrain.setup` there, as its command does.

Its data module is ours (an argument of `setup`): the same ids as everybody's, a beginning-of-sequence token before
each document as its TextFiles has it, rows of the context's length in an order drawn anew in each epoch. Its examples
count on days: 512 sequences in a batch and 1,000 steps of warm-up are here 32 sequences and 10 % of the steps, or the
rate would still be rising after ten minutes. All else is as its examples have it, torch.compile included.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.recipe.contender import Contender, Contest, Job, RunFailed, Trained, python, rate, run

SEQUENCES = 32
"""In a batch."""
WARMUP_FRACTION = 0.1
NEVER = 10**9


@dataclass(frozen=True)
class Litgpt(Contender):
    """One set of options."""

    name: str
    explanation: str
    optimizer: dict[str, Any]
    """Arguments of torch's AdamW."""
    min_lr: float
    tie_embeddings: bool

    def batch_tokens(self, contest: Contest, tokens: int) -> int:
        return SEQUENCES * contest.shape.seq_len

    def train(self, contest: Contest, job: Job) -> Trained:
        batch = self.batch_tokens(contest, job.tokens)
        steps, seconds_path = job.steps(batch), job.folder.resolve() / "seconds.json"
        task = {
            "shape": asdict(contest.shape),
            "vocab_size": contest.corpus.vocab_size,
            "bos_id": contest.corpus.bos_id,
            "eos_id": contest.corpus.eos_id,
            "ids": str(contest.corpus.train_ids),
            "precision": "bf16-mixed" if contest.precision == "bf16" else "32-true",
            "out_dir": str(job.folder.resolve() / "out"),
            "seconds": str(seconds_path),
            "steps": steps,
            "warmup_steps": max(1, round(WARMUP_FRACTION * steps)),
            "min_lr": self.min_lr,
            "tie_embeddings": self.tie_embeddings,
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": self.optimizer},
            "seed": job.seed,
        }
        run(contest, job, [*python("litgpt"), json.dumps(task)], [contest.peers])
        seconds = json.loads(seconds_path.read_text(encoding="utf-8"))
        if len(seconds) < steps:
            raise RunFailed(f"{len(seconds)} of {steps} steps were made ({job.log})")
        facts = {**self.optimizer, "min_lr": self.min_lr, "batch_tokens": batch, "warmup_steps": task["warmup_steps"]}
        return Trained(steps * batch, steps, rate(batch, seconds[:steps]), ("litgpt", f"{task['out_dir']}/final"),
                       contest.corpus.bos_id, facts)  # fmt: skip


LITGPT = (
    Litgpt(
        "litgpt",
        "config_hub/pretrain/tinystories.yaml: 5e-4, betas 0.9 and 0.95, weight decay 0.1, cosine to zero, tied",
        {"lr": 5e-4, "weight_decay": 0.1, "betas": [0.9, 0.95]},
        0.0,
        True,
    ),
    Litgpt(
        "litgpt-tutorial",
        "tutorials/pretrain.md on one's own text: 0.005, AdamW as torch has it, cosine to 4e-5, untied",
        {"lr": 0.005},
        4e-5,
        False,
    ),
)


def main() -> None:
    """Train: ``python -m benchmarks.recipe.litgpt TASK``, with litgpt on PYTHONPATH."""
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.config import Config
    from litgpt.data import DataModule
    from litgpt.pretrain import setup
    from torch.utils.data import DataLoader

    task = json.loads(sys.argv[1])
    sys.argv = ["pretrain", "same-size"]  # at the end it saves the options of its command, which it takes from here
    rows = _rows(task)
    seconds: list[float] = []

    class Ids(DataModule):  # type: ignore[misc]
        def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
            self.batch_size = batch_size

        def train_dataloader(self) -> Any:
            return DataLoader(rows, batch_size=self.batch_size, shuffle=True, drop_last=True)

        def val_dataloader(self) -> Any:  # two of its batches are tried before the first step
            return DataLoader(rows[: 2 * self.batch_size], batch_size=self.batch_size)

    _time_batches(seconds)
    shape = task["shape"]
    config = Config(
        name="same-size", block_size=shape["seq_len"], padded_vocab_size=task["vocab_size"],
        vocab_size=task["vocab_size"], n_layer=shape["layers"], n_head=shape["heads"], n_embd=shape["hidden_size"],
        rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP", intermediate_size=shape["ffn_hidden_size"],
    )  # fmt: skip
    setup(
        model_name="same-size", model_config=config, out_dir=Path(task["out_dir"]), precision=task["precision"],
        data=Ids(), seed=task["seed"], devices=1, logger_name="csv", optimizer=task["optimizer"],
        train=TrainArgs(
            save_interval=None, log_interval=10, global_batch_size=SEQUENCES, micro_batch_size=SEQUENCES,
            max_tokens=task["steps"] * SEQUENCES * shape["seq_len"], max_norm=1.0, min_lr=task["min_lr"],
            lr_warmup_steps=task["warmup_steps"], max_seq_length=shape["seq_len"],
            tie_embeddings=task["tie_embeddings"],
        ),
        eval=EvalArgs(interval=NEVER, max_iters=1, initial_validation=False, final_validation=False),
    )  # fmt: skip
    Path(task["seconds"]).write_text(json.dumps(seconds), encoding="utf-8")


def _rows(task: dict[str, Any]) -> Any:
    """int32[rows, S + 1]: the documents, each after a beginning-of-sequence token, in one stream."""
    import numpy as np
    import torch

    ids = np.load(task["ids"])
    ids = np.where(ids == task["eos_id"], task["bos_id"], ids)  # the end of one is the beginning of the next
    ids = np.concatenate([[task["bos_id"]], ids[:-1]])
    length = task["shape"]["seq_len"]
    starts = np.arange(0, len(ids) - length, length)
    return torch.from_numpy(np.stack([ids[at : at + length + 1] for at in starts]).astype(np.int32))


def _time_batches(seconds: list[float]) -> None:
    """Let litgpt's iterator over the training batches be timed: it is the only one of this class."""
    from litgpt import pretrain

    endless = pretrain.CycleIterator

    class Timed(endless):  # type: ignore[misc, valid-type]
        def __next__(self) -> Any:
            now = time.perf_counter()
            if hasattr(self, "asked"):
                seconds.append(now - self.asked)
            self.asked = now
            return super().__next__()

    pretrain.CycleIterator = Timed


if __name__ == "__main__":
    main()
