"""Hugging Face's run_clm.py in the contest: the script as it is, of the installed transformers or older; a new Llama.

    --run-clm transformers/examples/pytorch/language-modeling/run_clm.py

It tokenises and saves by itself; `train_runtime` is that of the steps alone. It has no compiler by default, so its
first steps count.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.recipe.contender import Contender, Contest, Job, RunFailed, Trained, run


@dataclass(frozen=True)
class RunClm(Contender):
    """One set of options."""

    name: str
    explanation: str
    sequences: int
    """In a batch."""
    options: dict[str, Any]
    warmup_fraction: float = 0.0

    def batch_tokens(self, contest: Contest, tokens: int) -> int:
        return self.sequences * contest.shape.seq_len

    def train(self, contest: Contest, job: Job) -> Trained:
        if contest.run_clm is None:
            raise RunFailed("--run-clm is not given")
        batch = self.batch_tokens(contest, job.tokens)
        steps, model = job.steps(batch), job.folder / "model"
        options = {
            "config_name": _config(contest, job.folder),
            "tokenizer_name": contest.corpus.hf_tokenizer,
            "train_file": contest.corpus.train_texts,
            "validation_file": contest.corpus.heldout_texts,  # without one it takes a twentieth of the training text
            "cache_dir": contest.corpus.folder / "run_clm",
            "block_size": contest.shape.seq_len,
            "output_dir": model,
            "per_device_train_batch_size": self.sequences,
            "max_steps": steps,
            "warmup_steps": round(self.warmup_fraction * steps),
            "seed": job.seed,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "bf16": contest.precision == "bf16",
            **self.options,
        }
        arguments = [part for key, value in options.items() for part in (f"--{key}", value)]
        command = [sys.executable, contest.run_clm.resolve(), "--do_train", "--use_cpu", *arguments]
        run(contest, job, command, [contest.peers], HF_DATASETS_OFFLINE="1")
        found = json.loads((model / "train_results.json").read_text(encoding="utf-8"))
        facts = {**self.options, "batch_tokens": batch, "warmup_steps": options["warmup_steps"]}
        speed = steps * batch / found["train_runtime"]
        return Trained(steps * batch, steps, speed, ("hf", str(model)), contest.corpus.bos_id, facts)


def _config(contest: Contest, folder: Path) -> Path:
    """A folder with the config.json of a Llama of the contest's size; --config_overrides leaves head_dim behind."""
    shape = contest.shape
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": contest.corpus.vocab_size,
              "hidden_size": shape.hidden_size, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
              "num_key_value_heads": shape.heads, "intermediate_size": shape.ffn_hidden_size,
              "max_position_embeddings": shape.seq_len, "tie_word_embeddings": True, "use_cache": False,
              "bos_token_id": contest.corpus.bos_id, "eos_token_id": contest.corpus.eos_id}  # fmt: skip
    (folder / "config").mkdir(parents=True, exist_ok=True)
    (folder / "config" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder / "config"


RUN_CLM = (
    RunClm("run_clm", "all defaults: AdamW, 5e-5 in a line to zero, 8 sequences", 8, {}),
    RunClm(
        "run_clm-course",
        "Hugging Face's course, chapter 7.6: 5e-4, cosine, weight decay 0.1; 32 sequences for its 256, 10 % warm-up",
        32,
        {"learning_rate": 5e-4, "lr_scheduler_type": "cosine", "weight_decay": 0.1},
        0.1,
    ),
    RunClm(
        "run_clm-common",
        "as small GPTs often are: 1e-3, betas 0.9 and 0.95, cosine, weight decay 0.1, 32 sequences, 5 % warm-up",
        32,
        {"learning_rate": 1e-3, "adam_beta2": 0.95, "lr_scheduler_type": "cosine", "weight_decay": 0.1},
        0.05,
    ),
)
