"""zerokara in the contest: the shipped config.yaml with a size by name, a corpus, and as many tokens as there is time.

Step 3 trains, step 4 exports, so that what is scored is a stock class of transformers.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from itertools import pairwise
from pathlib import Path

from benchmarks.recipe.contender import FIRST_STEPS, Contender, Contest, Job, RunFailed, Shape, Trained, run
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.forecast.sizes import Planner, size_settings
from zerokara.training.planning import recipe
from zerokara.training.planning.run_plan import RunPlan

ROOT = Path(__file__).resolve().parents[2]
QUIET = {"plots": "false", "tensorboard": "false", "wandb": "off", "sample_prompts": "[]", "eval_interval": 10**9,
         "save_interval": 10**9, "keep_last": 1, "keep_best": "false"}  # fmt: skip
"""Validated and saved at the end only, as the others are."""


def shipped_size() -> str:
    """The size of the shipped settings."""
    return load(PretrainConfig, ROOT / "config.yaml").model_size


def plan_of(corpus: Path, size: str, tokens: int, settings: tuple[str, ...] = ()) -> RunPlan:
    """What step 3 would do with the shipped settings; `corpus` is a configuration that names token files."""
    given = _settings(corpus, size, tokens, 1)
    planner = Planner(ROOT / "config.yaml", (*(f"{key}={value}" for key, value in given.items()), *settings))
    return planner.local_plan()


def shape_of(plan: RunPlan) -> Shape:
    """The size that the others take as well."""
    shape = plan.shape
    return Shape(shape.num_layers, shape.hidden_size, shape.num_attn_heads, shape.ffn_hidden_size, shape.seq_len)


def _settings(corpus: Path, size: str, tokens: int, seed: int) -> dict[str, object]:
    config = load(PretrainConfig, corpus)
    where = {"input_jsonl": json.dumps(config.input_jsonl), "input_tokenizer_file": config.input_tokenizer_file,
             "output_prefix": config.output_prefix}  # fmt: skip
    return {**where, **size_settings(size), **QUIET, "train_tokens": tokens, "seed": seed}  # type: ignore[arg-type]


class Ours(Contender):
    """The recipe as shipped."""

    name = "zerokara"
    explanation = "config.yaml as shipped, with model_size and train_tokens"

    def batch_tokens(self, contest: Contest, tokens: int) -> int:
        return plan_of(contest.corpus.config, contest.size, tokens, contest.settings).schedule.batch_tokens

    def train(self, contest: Contest, job: Job) -> Trained:
        plan = plan_of(contest.corpus.config, contest.size, job.tokens, contest.settings)
        settings = _settings(contest.corpus.config, contest.size, job.tokens, job.seed)
        settings |= dict(each.split("=", 1) for each in contest.settings)
        run_dir, export = job.folder / "run", job.folder / "hf"
        settings["output_model_dir"] = run_dir
        if job.is_trial:  # the batch is that of the whole run, which would be another for so few tokens
            batch = plan.schedule.batch_tokens
            settings |= {"global_batch_size": plan.resolved.global_batch_size, "optimizer": plan.resolved.optimizer,
                         "train_tokens": job.steps(batch) * batch, "log_interval": 1}  # fmt: skip
        arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        config = ["--config", ROOT / "config.yaml"]
        run(contest, job, ["bash", ROOT / "3_train_node1.sh", *config, *arguments])
        tokens, steps, speed = _speed(run_dir / "metrics.jsonl")
        if not job.is_trial:
            self._export(contest, job, run_dir, export)
        chosen = {key: getattr(plan.resolved, key) for key in recipe.RULES}
        facts = {**chosen, "precision": plan.resolved.precision, "micro_batch_size": plan.resolved.micro_batch_size,
                 "processes": plan.num_processes,
                 "bits_per_byte_by_step_3": _validated(run_dir / "metrics.jsonl")}  # fmt: skip
        shutil.rmtree(run_dir)
        return Trained(tokens, steps, speed, ("hf", str(export)), contest.corpus.eos_id, facts)

    def _export(self, contest: Contest, job: Job, run_dir: Path, export: Path) -> None:
        options = [f"input_model_dir={run_dir}", f"output_tokenizer_and_model_dir={export}", "dtype=fp32"]
        options += ["check_lines=100", "test_prompt_text=[]"]
        arguments = [part for each in options for part in ("--set", each)]
        run(contest, job, ["bash", ROOT / "4_convert_to_HF.sh", "--config", ROOT / "convert_config.yaml", *arguments])


def recipe_hash() -> str:
    """Of the shipped settings and the version of the recipe: with others, a result is none of today's."""
    content = (ROOT / "config.yaml").read_bytes() + str(recipe.VERSION).encode()
    return hashlib.sha256(content).hexdigest()[:12]


def _validated(metrics: Path) -> float | None:
    """What step 3 found itself, in windows of its own, for comparison."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return next((line["valid_bits_per_byte"] for line in reversed(lines) if "valid_bits_per_byte" in line), None)


def _speed(metrics: Path) -> tuple[int, int, float]:
    """Tokens, steps, and tokens a second of the steps after the first ones; validations are not in it."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if "tokens_per_second" in line]
    parts = [(new["tokens"] - old["tokens"], new["tokens_per_second"])
             for old, new in pairwise(lines) if old["step"] >= min(FIRST_STEPS, lines[-1]["step"] // 2)]  # fmt: skip
    if not parts:
        raise RunFailed(f"{metrics} has too few steps to measure")
    seconds = sum(tokens / speed for tokens, speed in parts)
    return lines[-1]["tokens"], lines[-1]["step"], sum(tokens for tokens, _ in parts) / seconds
