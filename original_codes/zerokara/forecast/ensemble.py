"""Several models of one size, and one that learns from all of them: their number, their YAML files, and the commands.

In: the settings of the plan, and how many. Out: beside the run folder a folder with a configuration and a run folder
for each, and a script that trains and converts one after another. The models differ in their seed alone; the last one
is their student (`model.loss`). What it gains: docs/recipe.md#several-models.
"""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zerokara.base.durable import make_folders, write_file
from zerokara.base.errors import Fault, UserError
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.writing import as_yaml, overrides
from zerokara.training.planning import recipe

MOST = 8
MIN_EPOCHS = 4
"""Minimum epochs: below it, more epochs of one model are worth more than further models."""
_HEAD = """#!/usr/bin/env bash
# Trains {number} models that differ in their seed, then the one that learns from them. Written by plan.py.
# Run it again to continue: it skips what is done.
set -euo pipefail
cd {folder}
"""


def is_possible(config: PretrainConfig) -> bool:
    """Tell whether such a model can learn from others, from the first step on."""
    return not (config.traits.is_encoder_decoder or config.tensor_parallel_size > 1 or config.init_from)


def check(number: int | None, config: PretrainConfig) -> None:
    """Raise UserError if `number` models cannot be planned to teach one more."""
    if number is not None and not (1 <= number <= MOST and is_possible(config)):
        rule = f"must be 1 to {MOST}, the models that one more learns from"
        if 1 <= number <= MOST:
            rule = "needs a decoder from scratch, and tensor_parallel_size 1: one model learns from the others"
        raise UserError(Fault("--models", rule, value=number, remedy="leave it out for one model"))


def relative_time(number: int) -> float:
    """Return the time of `number` teachers, or none, and their student, in units of one teacher's run."""
    return number + 1 + number * recipe.TEACHER_SHARE


def num_teachers_that_fit(hours: float, hours_of_one: float) -> int:
    """Return for how many teachers, and their student, there is time; 0 if for none."""
    return max((number for number in range(1, MOST + 1) if relative_time(number) * hours_of_one <= hours), default=0)


def folder_of(config: PretrainConfig, number: int) -> Path:
    """Return the folder of the files and runs of so many teachers and their student."""
    return Path(f"{Path(config.output_model_dir)}_learns_from_{number}")


def write(
    config_path: Path, given: Sequence[str], number: int, commands: Callable[[Path, PretrainConfig], list[str]]
) -> str:
    """Write the files for `number` teachers of the configuration with the settings `given`; return the script's name,
    as a shell takes it.

    `commands` are those that train a configuration in a file, and convert its model.
    """
    config = load(PretrainConfig, config_path, given)
    folder = folder_of(config, number)
    runs, student = [folder / str(each) for each in range(1, number + 1)], folder / "student"
    changes: dict[Path, dict[str, Any]] = {run: {"seed": config.seed + int(run.name), "teachers": ()} for run in runs}
    changes[student] = {"teachers": tuple(f"{run}_hf" for run in runs)}
    lines = []
    make_folders(folder)
    for run, change in changes.items():
        path, change = folder / f"{run.name}_config.yaml", {**change, "output_model_dir": str(run)}
        each = load(PretrainConfig, config_path, [*given, *overrides(change)])
        write_file(path, as_yaml(each))
        lines += commands(path, each)
    lines.append(f"echo {shlex.quote(f'all done: the model that learned from the others is {student}_hf')}")
    script = folder / "run.sh"
    write_file(script, _HEAD.format(number=number, folder=shlex.quote(str(Path.cwd()))) + "\n".join(lines) + "\n")
    return shlex.quote(str(script))
