"""What do the rules for little text gain? Compares one model by the old and the new rules, and a student of several.

    python -m benchmarks.recipe.little_text OUT --config ja.yaml --config pt.yaml --size 1M --before 4,8 --epochs 16 \\
        --models 3 --seeds 1234,1235,1236

A configuration names tokenizer and token files (steps 1 and 2 come before), with `valid_jsonl` of documents that no run
reads. Every run is one of step 3 on one core. The rows:

before       rate and weight decay by the rules for text that is read once, at each number of epochs of --before
after        all by the rules, at --epochs
old rate     after, with the rate of before
old decay    after, with the weight decay of before
dropout      after, with dropout 0.1 and a third of the weight decay
student      one model of that size, taught by --models others of other seeds: all trained as after

Bits per byte of the held-out documents, as step 8 counts them, at the end of each run: mean and standard deviation over
the seeds, and the difference to the best row of before. OUT/results.jsonl has a line for each finished run, and a run
that stands there is not trained again; one that was stopped goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.recipe.sweep import AUTO, QUIET, RESULTS, ROOT
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.settings import resolved
from zerokara.forecast import ensemble
from zerokara.training.planning import recipe, run_plan
from zerokara.training.planning.schedule import extent_of, num_samples

OF_FRESH_TEXT, A_THIRD = "of fresh text", "a third"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", type=Path, action="append", required=True)
    parser.add_argument("--size", default="1M", help="model_size")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="the same for every run")
    parser.add_argument("--before", default="4,8", help="epochs of the rows of before")
    parser.add_argument("--epochs", default="16", help="epochs of all other rows")
    parser.add_argument("--row", action="append", help="all of the above, if none is given")
    parser.add_argument("--models", type=int, default=0, help="teachers of the student; 0 for no such row")
    parser.add_argument("--seeds", default="1234")
    parser.add_argument("--core", type=int, default=0, help="the core that computes")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for config in options.config:
        for seed in options.seeds.split(","):
            for row, epochs, changes in rows(options):
                name = f"{config} {options.size} {' '.join(options.set)} {row} {epochs} {seed}"
                if name not in finished(options.out):
                    settings = {**AUTO, **QUIET, "max_epochs_per_source": "1000", "model_size": options.size}
                    settings |= dict(each.split("=", 1) for each in options.set) | {"epochs": epochs, "seed": seed}
                    key = hashlib.sha256(name.encode()).hexdigest()[:12]
                    value = trained(options, config, {**settings, **changes}, row, options.out / key)
                    line = {"name": name, "corpus": str(config), "row": f"{row}, {epochs} epochs", "seed": seed}
                    with open(options.out / RESULTS, "a", encoding="utf-8") as file:
                        file.write(json.dumps({**line, "bits_per_byte": value}) + "\n")
    for line in table(list(finished(options.out).values())):
        print(line)


def rows(options: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, str]]]:
    """The rows that are asked for: name, epochs, settings that are not left to the rules."""
    changes = {
        "before": {"lr": OF_FRESH_TEXT, "weight_decay": OF_FRESH_TEXT},
        "after": {},
        "old rate": {"lr": OF_FRESH_TEXT},
        "old decay": {"weight_decay": OF_FRESH_TEXT},
        "dropout": {"dropout": "0.1", "weight_decay": A_THIRD},
        "student": {},
    }
    for row in options.row or [row for row in changes if row != "student" or options.models]:
        for epochs in (options.before if row == "before" else options.epochs).split(","):
            yield f"student of {options.models}" if row == "student" else row, epochs, changes[row]


def finished(out: Path) -> dict[str, dict[str, Any]]:
    """The results so far, by the name of the run."""
    path = out / RESULTS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {each["name"]: each for each in map(json.loads, lines)}


def trained(options: argparse.Namespace, config: Path, settings: dict[str, str], row: str, run: Path) -> float:
    """Train a run in a folder, of a student its teachers first; return its bits per byte."""
    settings = resolved_here(config, {**settings, "output_model_dir": str(run)})
    given, run_dir = [f"{key}={value}" for key, value in settings.items()], run
    if row.startswith("student"):
        command = ["bash", ensemble.write(config, given, options.models, commands)]
        run_dir = ensemble.folder_of(load(PretrainConfig, config, given), options.models) / "student"
    else:
        command = ["bash", str(ROOT / "3_train_node1.sh"), "--config", str(config)]
        command += [part for each in given for part in ("--set", each)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with open(options.out / "log.txt", "a", encoding="utf-8") as log:
        subprocess.run(
            ["taskset", "-c", str(options.core), *command], stdout=log, stderr=log, env=environment, check=True
        )
    metrics = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    value: float = [line["valid_bits_per_byte"] for line in metrics if "valid_bits_per_byte" in line][-1]
    for folder in run.parent.glob(f"{run.name}*"):
        shutil.rmtree(folder)
    return value


def commands(path: Path, config: PretrainConfig) -> list[str]:
    """The commands that train a configuration, and convert its model."""
    run = config.output_model_dir
    made = [f"input_model_dir={run}", f"output_tokenizer_and_model_dir={run}_hf", "dtype=fp32"]
    train = ["bash", str(ROOT / "3_train_node1.sh"), "--config", str(path)]
    convert = ["bash", str(ROOT / "4_convert_to_HF.sh"), "--config", str(ROOT / "convert_config.yaml")]
    return [shlex.join(train), shlex.join(convert + [part for each in made for part in ("--set", each)])]


def resolved_here(config: Path, settings: dict[str, str]) -> dict[str, str]:
    """Settings with values for those that name one: that of a run whose text is read once, or a third of the rule's."""
    named = {key: value for key, value in settings.items() if value in (OF_FRESH_TEXT, A_THIRD)}
    left = {**settings, **dict.fromkeys(named, "auto")}
    requested = load(PretrainConfig, config, [f"{key}={value}" for key, value in left.items()])
    plan = run_plan.make_plan(requested)
    extent = extent_of(plan.data.training)
    fresh, _ = recipe.resolve(requested, plan.shape, lambda given: num_samples(given, *extent))
    for key, name in named.items():
        value = getattr(fresh, key) if name == OF_FRESH_TEXT else resolved(getattr(plan.resolved, key)) / 3
        settings[key] = str(value)
    return settings


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of a table for each corpus."""
    for corpus in dict.fromkeys(each["corpus"] for each in results):
        by_row: dict[str, list[float]] = {}
        for each in results:
            if each["corpus"] == corpus:
                by_row.setdefault(each["row"], []).append(each["bits_per_byte"])
        means = {row: statistics.mean(values) for row, values in by_row.items()}
        best = min((mean for row, mean in means.items() if row.startswith("before")), default=min(means.values()))
        yield f"\n| {corpus} | bits per byte | ± | seeds | to the best of before |"
        yield "|---|---:|---:|---:|---:|"
        for row, values in by_row.items():
            spread = f"{statistics.stdev(values):.4f}" if len(values) > 1 else ""
            yield f"| {row} | {means[row]:.4f} | {spread} | {len(values)} | {means[row] / best - 1:+.1%} |"


if __name__ == "__main__":
    sys.exit(main())
