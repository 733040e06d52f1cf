"""Fine-tunings of small models on few and many examples, in many settings, and a table of what they come to.

    python -m benchmarks.recipe.finetune OUT --corpora DIR --task sentiment --task pairs --examples 200,2000 \\
        --vary lr=x0.5,x1,x2 --vary epochs=x0.5,x1,x2 --seeds 1,2,3

Every combination is a run of step 7 with its configuration as shipped, on one core, `--jobs` at a time. A value ``x2``
is twice what the recipe has for that run, ``auto`` the recipe's own. Two hundred examples validate and a thousand test;
they are none of the training examples, which the seed draws (`finetune_data.py` makes all of them from real
text). The base models are made first, by steps 1 to 4. OUT/results.jsonl has a line for each finished run, and a run
that stands there is not trained again: a sweep that was stopped goes on, and a larger one only adds.

Each table has the runs of a task, a number of examples and a base model: the metric of the test examples with the best
checkpoint, mean and range over the seeds. `--summary` compares the recipe's own with the best of each table instead.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.recipe.finetune_data import METRICS, TESTED, write_base, write_examples
from benchmarks.recipe.new_language import step
from zerokara import checkpoint
from zerokara.checkpoint.folders import read_metrics
from zerokara.config.finetune_config import FinetuneConfig
from zerokara.config.loading import load
from zerokara.finetuning import task as finetuning
from zerokara.finetuning import worker
from zerokara.training import auto_settings
from zerokara.training.planning import run_folder
from zerokara.training.planning.run_plan import PLAN_NAME, RunPlan, make_plan
from zerokara.training.spawning import local_rendezvous

ROOT = Path(__file__).resolve().parents[2]

BASES = {"0.2M": (64, 3, 2, 4_000_000), "1M": (128, 4, 2, 3_000_000)}
"""Hidden size, layers, heads, and the tokens that the base model is trained on."""
QUIET = {"plots": False, "tensorboard": False, "wandb": "off", "num_processes": 1, "micro_batch_size": "auto"}
SHOWN = ("epochs", "global_batch_size", "lr")
RESULTS = "results.jsonl"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--corpora", type=Path, required=True, help="folder with the files that the examples are of")
    parser.add_argument("--task", action="append", choices=METRICS, help="all, if none is given")
    parser.add_argument("--base", action="append", choices=BASES, help="all, if none is given")
    parser.add_argument("--examples", default="200,2000,20000")
    parser.add_argument("--vary", action="append", default=[], metavar="KEY=VALUE,VALUE")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--summary", action="store_true", help="train nothing more")
    given = parser.parse_args()
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    results, wanted = _results(given.out), list(_runs(given))
    if given.summary:
        for line in summary([results[key] for run in wanted if (key := _key(run)) in results]):
            print(line)
        return
    _make_bases(given)
    waiting = [run for run in wanted if _key(run) not in results]
    for number in range(given.jobs):
        if not os.fork():
            for run in waiting[number :: given.jobs]:
                _finish(given, run)
            os._exit(0)
    for _ in range(given.jobs):
        os.wait()
    results = _results(given.out)
    for line in table([results[key] for run in wanted if (key := _key(run)) in results]):
        print(line)


def _make_bases(given: argparse.Namespace) -> None:
    """Train the tokenizer and the base models, unless they are there."""
    text = given.out / "base.jsonl"
    if not text.exists():
        write_base(given.corpora, text)
    tokenizer = given.out / "tokenizer"
    if not (tokenizer / "tokenizer.model").exists():
        step("train_tokenizer", input=text, output_dir=tokenizer, vocab_size=4000)
    for name in given.base or BASES:
        width, layers, heads, tokens = BASES[name]
        if not (given.out / f"{name}_hf").exists():
            settings: dict[str, Any] = {
                "input_jsonl": text, "output_prefix": given.out / "base_tokens",
                "input_tokenizer_file": tokenizer / "tokenizer.model", "output_model_dir": given.out / name,
                "model_size": "", "hidden_size": width, "num_layers": layers, "num_attn_heads": heads, "seq_len": 256,
                "train_tokens": tokens, "sample_prompts": "[]", "eval_interval": 100_000, "save_interval": 100_000,
            }  # fmt: skip
            step("tokenize", **settings)
            step("train", **settings, **QUIET)
            exported = {"input_model_dir": given.out / name, "output_tokenizer_and_model_dir": given.out / f"{name}_hf"}
            step("convert_to_hf", **exported, language="[mul]")


def _runs(given: argparse.Namespace) -> Iterator[dict[str, str]]:
    """The settings of each run, by name; task, base and examples are none of step 7."""
    varied = {key: values.split(",") for key, _, values in (each.partition("=") for each in given.vary)}
    of_run = itertools.product(
        given.examples.split(","), given.task or METRICS, given.base or BASES, given.seeds.split(","), *varied.values()
    )
    for examples, task, base, seed, *values in of_run:
        yield {"task": task, "base": base, "examples": examples, "seed": seed, **dict(zip(varied, values, strict=True))}


def _key(run: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:16]


def _results(out: Path) -> dict[str, dict[str, Any]]:
    path = out / RESULTS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {found["key"]: found for found in map(json.loads, lines)}


def _finish(given: argparse.Namespace, run: dict[str, str]) -> None:
    """Train and test one run, and add its result."""
    started, key = time.monotonic(), _key(run)
    examples = given.out / "examples"
    examples.mkdir(exist_ok=True)
    files = write_examples(given.corpora, examples, run["task"], int(run["examples"]), int(run["seed"]))
    settings: dict[str, object] = {f"{split}_data": f"[{path}]" for split, path in files.items()}
    settings |= {**QUIET, "init_from": given.out / f"{run['base']}_hf", "metric": METRICS[run["task"]]}
    settings |= {"output_prefix": examples / f"{key}_tokens", "output_model_dir": given.out / key, "seed": run["seed"]}
    settings |= {"eval_examples": "all"}
    plan_path, folder = given.out / key / PLAN_NAME, given.out / key
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
    with open(given.out / "log.txt", "a", encoding="utf-8") as log:
        for work in (lambda: _train(settings, run), lambda: _test(plan_path, TESTED.get(run["task"]))):
            if _in_fork(work, log.fileno()):
                print(f"failed: {run}; see {log.name}", flush=True)
                return
    metrics = read_metrics(folder)
    chosen = json.loads(plan_path.read_text(encoding="utf-8"))["resolved"]
    loaded = json.loads((folder / finetuning.RESULT_NAME).read_text(encoding="utf-8"))
    metric = METRICS[run["task"]]
    result = {
        "key": key,
        "settings": run,
        "chosen": {name: chosen[name] for name in SHOWN},
        "metric": metric,
        "value": loaded[f"test_{metric}"],
        "loss": loaded["test_loss"],
        **{key: value for key, value in loaded.items() if key == f"test_{TESTED.get(run['task'])}"},
        "best_step": loaded["step"],
        "valid": [[line["step"], line[f"valid_{metric}"]] for line in metrics if f"valid_{metric}" in line],
        "seconds": round(time.monotonic() - started, 1),
    }
    with open(given.out / RESULTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(result, ensure_ascii=False) + "\n")
    print(f"{result['value']:.4f} at {result['best_step']}  {run}  {result['seconds']} s", flush=True)
    shutil.rmtree(folder)
    for path in examples.glob(f"{key}_tokens*"):
        path.unlink()


def _in_fork(work: Callable[[], int], log: int) -> int:
    """Do `work` as the only training process, in a fork: everything is imported, which takes seconds otherwise."""
    with local_rendezvous() as place:
        if child := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        code = 1
        try:
            os.dup2(log, 1), os.dup2(log, 2)
            one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
            os.environ.update(one, **place)
            torch.set_num_threads(1)
            code = work()
        except BaseException:
            traceback.print_exc()
        os._exit(code)


def _train(settings: dict[str, object], run: dict[str, str]) -> int:
    given = {key: value for key, value in run.items() if key not in ("task", "base", "examples", "seed")}
    plan = _plan(settings, {key: value for key, value in given.items() if not value.startswith("x")})
    times = {key: float(value[1:]) for key, value in given.items() if value.startswith("x")}
    if times:  # as multiples of what the recipe has for this run
        numbers = {key: getattr(plan.resolved, key) for key in times}
        scaled = {key: type(number)(max(1, round(number * times[key]))) if isinstance(number, int) else
                  number * times[key] for key, number in numbers.items()}  # fmt: skip
        plan = _plan(settings, {**given, **scaled})
    run_folder.claim(plan)
    return worker.main([str(plan.run_dir / PLAN_NAME), "train"])


def _plan(settings: dict[str, object], given: dict[str, Any]) -> RunPlan:
    overrides = [f"{key}={value}" for key, value in {**settings, **given}.items()]
    config = finetuning.prepared(load(FinetuneConfig, ROOT / "finetune_config.yaml", overrides))
    return auto_settings.on_this_machine(make_plan(config, task=finetuning.FINETUNING))


def _test(plan_path: Path, metric: str | None) -> int:
    if metric:  # which chose no checkpoint: answers of each validation would take longer than the training
        plan = json.loads(plan_path.read_text(encoding="utf-8"))
        plan["resolved"]["metric"] = plan["requested"]["metric"] = metric
        plan_path.write_text(json.dumps(plan), encoding="utf-8")
    best = checkpoint.best(plan_path.parent) or checkpoint.newest_complete(plan_path.parent)
    return worker.main([str(plan_path), "test", str(best)])


def _tables(results: list[dict[str, Any]]) -> dict[tuple[str, ...], dict[tuple[str, ...], list[dict[str, Any]]]]:
    """Results by task, examples and base, then by what is varied."""
    places = ("task", "examples", "base")
    found: dict[tuple[str, ...], dict[tuple[str, ...], list[dict[str, Any]]]] = {}
    for result in results:
        settings = result["settings"]
        values = tuple(f"{key} {value}" for key, value in settings.items() if key not in (*places, "seed"))
        found.setdefault(tuple(settings[key] for key in places), {}).setdefault(values, []).append(result)
    return found


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of a table for each task, number of examples and base: means over the seeds, the best first."""
    for place, by_values in _tables(results).items():
        sign = 1 if METRICS[place[0]] == "loss" else -1
        yield f"\n{', '.join(place)}"
        yield "| varied | " + " | ".join(SHOWN) + f" | {METRICS[place[0]]} | seeds | seconds |"
        yield "|---|" + "---:|" * (len(SHOWN) + 3)
        means = {values: fmean(one["value"] for one in some) for values, some in by_values.items()}
        for values, mean in sorted(means.items(), key=lambda item: sign * item[1]):
            some = by_values[values]
            found = [one["value"] for one in some]
            shown = " | ".join(f"{some[0]['chosen'][key]:g}" for key in SHOWN)
            seconds = fmean(one["seconds"] for one in some)
            yield (
                f"| {', '.join(values) or 'the rule'} | {shown} | {mean:.4f} ({min(found):.4f} to {max(found):.4f}) | "
                f"{len(some)} | {seconds:.0f} |"
            )


def summary(results: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of one table: the recipe's own (all settings ``x1``) beside the best and the worst of each table."""
    yield "| task | examples | base | the rule | best of the sweep | worst | the rule to the best | runs, seeds |"
    yield "|---|---:|---|---:|---:|---:|---:|---:|"
    for (task, examples, base), by_values in _tables(results).items():
        sign = 1 if METRICS[task] == "loss" else -1
        means = {values: fmean(one["value"] for one in some) for values, some in by_values.items()}
        own = next((mean for values, mean in means.items() if all(value.endswith(" x1") for value in values)), None)
        if own is None:
            continue
        best, *_, worst = sorted(means.values(), key=lambda value: sign * value)
        seeds = min(map(len, by_values.values()))
        cells = " | ".join(f"{value:.4f}" for value in (own, best, worst))
        yield f"| {task} | {examples} | {base} | {cells} | {sign * (own / best - 1):+.1%} | {len(means)}, {seeds} |"


if __name__ == "__main__":
    main()
