"""Many short runs of step 3 that differ in a few settings, and a table of what they come to.

    python -m benchmarks.recipe.sweep OUT --config english.yaml --config japanese.yaml --size 1M --size 5M \\
        --tokens 4e6 --vary lr=x0.5,x1,x2 --vary optimizer=muon,adamw --seeds 1234,1235

Every combination is a run, on one core each, as many at a time as there are cores. A value ``x2`` is twice what the
recipe has for that run, ``auto`` is the recipe's own. OUT/results.jsonl has a line for each finished run with its
settings and its bits per byte; a run that stands there is not trained again, so a sweep that was stopped goes on, and a
larger one only adds. The configurations name tokenizer and token files (steps 1 and 2 come before), and every setting
that is not varied.

Each table compares the runs of one corpus and size: bits per byte, and how much more than the best it is.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.training.planning import recipe, run_plan

ROOT = Path(__file__).resolve().parents[2]

AUTO = dict.fromkeys([*recipe.RULES, "warmup_fraction", "num_layers", "hidden_size", "num_attn_heads"], "auto")
QUIET = {"plots": "false", "tensorboard": "false", "sample_prompts": "[]", "eval_interval": "1000000", "keep_last": "1",
         "save_interval": "1000000", "keep_best": "false", "num_processes": "1"}  # fmt: skip
RESULTS = "results.jsonl"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", type=Path, action="append", default=[])
    parser.add_argument("--size", action="append", default=[], help="model_size")
    parser.add_argument("--tokens", default="auto", help="train_tokens of each run")
    parser.add_argument("--vary", action="append", default=[], metavar="KEY=VALUE,VALUE")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="the same for every run")
    parser.add_argument("--seeds", default="1234")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = list(_runs(options))
    _train_all(options.out, [run for run in wanted if _key(run) not in _finished(options.out)], options.jobs)
    finished = _finished(options.out)
    for line in table([finished[_key(run)] for run in wanted if _key(run) in finished], _varied(options)):
        print(line)


def _varied(options: argparse.Namespace) -> list[str]:
    return [each.partition("=")[0] for each in options.vary]


def _runs(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """The settings of each run, by name; `config` and `size` are none."""
    fixed = dict(each.split("=", 1) for each in options.set)
    choices = [each.partition("=")[2].split(",") for each in options.vary]
    for config, size, *values, seed in itertools.product(
        options.config, options.size, *choices, options.seeds.split(",")
    ):
        varied = dict(zip(_varied(options), values, strict=True))
        yield {**AUTO, **fixed, "config": str(config), "model_size": size, "train_tokens": options.tokens,
               "seed": seed, **varied}  # fmt: skip


def _key(run: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:16]


def _finished(out: Path) -> dict[str, dict[str, Any]]:
    path = out / RESULTS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {found["key"]: found for found in map(json.loads, lines)}


def _train_all(out: Path, runs: list[dict[str, str]], jobs: int) -> None:
    """Train runs beside each other, each on a core of its own."""
    waiting: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
    for run in runs:
        waiting.put(run)
    lock, left = threading.Lock(), itertools.count(len(runs) - 1, -1)

    def work(core: int) -> None:
        while True:
            try:
                run = waiting.get_nowait()
            except queue.Empty:
                return
            found = _train(out, run, core)
            with lock, open(out / RESULTS, "a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
                print(f"{found['bits_per_byte']:.4f}  {found['seconds']:.0f} s  {run}; {next(left)} left", flush=True)

    cores = sorted(os.sched_getaffinity(0))[:jobs]
    threads = [threading.Thread(target=work, args=(core,)) for core in cores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _train(out: Path, run: dict[str, str], core: int) -> dict[str, Any]:
    """Train one run to its end, or go on with it; give its result."""
    folder = out / _key(run)
    settings = {**QUIET, **run, "output_model_dir": str(folder)}
    config = Path(settings.pop("config"))
    settings = {**settings, **_scaled(config, settings)}
    arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = ["bash", str(ROOT / "3_train_node1.sh"), "--config", str(config), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    started = time.monotonic()
    with open(out / f"{folder.name}.log", "a", encoding="utf-8") as log:
        subprocess.run(["taskset", "-c", str(core), *command], stdout=log, stderr=log, env=environment, check=True)
    seconds = time.monotonic() - started
    metrics = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    last = [line for line in metrics if "valid_bits_per_byte" in line][-1]
    shutil.rmtree(folder)
    return {"key": _key(run), "settings": run, "chosen": {key: settings[key] for key in recipe.RULES},
            "bits_per_byte": last["valid_bits_per_byte"], "seconds": seconds}  # fmt: skip


def _scaled(config: Path, settings: dict[str, str]) -> dict[str, Any]:
    """What stands for `auto` and for ``x2``, in the order of the rules: each goes by those before it."""
    found: dict[str, Any] = {}
    for key in recipe.RULES:
        value = settings[key]
        if value == "auto" or value.startswith("x"):
            known = {**settings, **{each: found.get(each, "auto") for each in recipe.RULES}}
            given = load(PretrainConfig, config, [f"{name}={each}" for name, each in known.items()])
            number = getattr(run_plan.make_plan(given).resolved, key)
            factor = float(value[1:]) if value.startswith("x") else 1
            found[key] = number if value == "auto" else type(number)(number * factor)
        else:
            found[key] = value
    return found


def table(results: list[dict[str, Any]], varied: list[str]) -> Iterator[str]:
    """Lines of a table for each corpus and size: the mean over seeds, the best first."""
    groups: dict[tuple[str, str], dict[tuple[str, ...], list[dict[str, Any]]]] = {}
    for result in results:
        settings = result["settings"]
        place = groups.setdefault((Path(settings["config"]).stem, settings["model_size"]), {})
        place.setdefault(tuple(settings[key] for key in varied), []).append(result)
    for (corpus, size), by_values in groups.items():
        means = {
            values: sum(result["bits_per_byte"] for result in some) / len(some) for values, some in by_values.items()
        }
        best = min(means.values())
        yield f"\n{corpus}, {size}"
        yield f"| {' | '.join(varied)} | bits per byte | above the best | seeds | seconds |"
        yield "|" + "---|" * (len(varied) + 4)
        for values, mean in sorted(means.items(), key=lambda item: item[1]):
            some = by_values[values]
            shown = [f"{key} ({some[0]['chosen'].get(name, key)})" for name, key in zip(varied, values, strict=True)]
            seconds = sum(result["seconds"] for result in some) / len(some)
            yield f"| {' | '.join(shown)} | {mean:.4f} | {mean / best - 1:+.2%} | {len(some)} | {seconds:.0f} |"


if __name__ == "__main__":
    main()
