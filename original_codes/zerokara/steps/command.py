"""The command line that the steps share: the table of steps, their options, and the command that comes next.

Exit codes: 0 done, 1 failed while running, 2 wrong settings or input, 130 stopped. Every command that a step prints is
ready to paste: quoted for the shell, with the configuration file that belongs to this one.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml.error import YAMLError

from zerokara.config.data import DataSettings
from zerokara.config.loading import FILES, load, read_value
from zerokara.config.settings import Settings
from zerokara.config.writing import help_text
from zerokara.errors import SAME_COMMAND, UserError, guarded

COMMAND_NAME = "ZEROKARA_COMMAND"
"""Environment variable with the name by which the user called a shell script."""


@dataclass(frozen=True)
class Step:
    """A numbered script and its configuration."""

    runner: str
    script: str
    config_name: str
    """The default configuration file."""

    @property
    def config_class(self) -> type[Settings]:
        """The class of its settings."""
        return FILES[self.config_name]


TRAIN_TOKENIZER = Step("python", "1_train_sentencepiece_tokenizer.py", "sentence_piece_config.yaml")
TOKENIZE = Step("bash", "2_tokenize.sh", "config.yaml")
COUNT_TOKENS = Step("python", "count_tokens.py", "config.yaml")
PLAN = Step("python", "0_plan.py", "config.yaml")
TRAIN = Step("bash", "3_train_node1.sh", "config.yaml")
CONVERT = Step("bash", "4_convert_to_HF.sh", "convert_config.yaml")
UPLOAD = Step("python", "6_upload.py", "convert_config.yaml")
FINETUNE = Step("bash", "7_finetune.sh", "finetune_config.yaml")
EVALUATE = Step("python", "8_evaluate.py", "evaluate_config.yaml")
STEPS = (PLAN, TRAIN_TOKENIZER, TOKENIZE, COUNT_TOKENS, TRAIN, CONVERT, UPLOAD, FINETUNE, EVALUATE)


@dataclass(frozen=True)
class Options:
    """The options of the command line that are not settings."""

    config_path: Path
    overrides: Sequence[str] = ()
    redo: bool = False
    dry_run: bool = False
    write: bool = False
    verify_resume: int | None = None
    """Number of steps in which to verify that a run resumes, instead of running it; None to run."""
    evaluate: str | None = None
    """Checkpoint to validate instead of running: a folder, a name, a step, or "" for the newest; None to run."""
    hours: float | None = None
    """Hours of training that there are; None for no limit."""
    tokens: float | None = None
    """Tokens to train on; None for no limit."""
    fit: float | None = None
    """Minutes in which small models are trained to fit a scaling law; None for none."""
    join: str | None = None
    """Where the first of several machines waits for this one; None on the first, or on a lone one."""
    host: str | None = None
    """The address of this machine, the first of several; None for that of its default route."""
    again: str = SAME_COMMAND
    """The command that resumes this one."""


def _steps(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: must be a number of steps, 1 or more")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a number above 0")
    return number


_FLAGS: dict[str, dict[str, Any]] = {
    "redo": {"action": "store_true"},
    "dry_run": {"action": "store_true"},
    "write": {"action": "store_true"},
    "hours": {"type": _positive, "metavar": "H"},
    "tokens": {"type": _positive, "metavar": "N"},
    "fit": {"type": _positive, "nargs": "?", "const": 10.0, "metavar": "MINUTES"},
    "verify_resume": {"type": _steps, "nargs": "?", "const": 3, "metavar": "N"},
    "join": {"metavar": "HOST[:PORT]"},
    "host": {"metavar": "HOST[:PORT]"},
    "evaluate": {"nargs": "?", "const": "", "metavar": "CHECKPOINT"},
}
"""Arguments of argparse's `add_argument` for each flag."""
_HELP = {
    "redo": "do it again, and replace the outputs of an earlier run",
    "dry_run": "check everything, print what would be done, and stop",
}
"""Help of the flags that every step has."""


def parse(step: Step, doc: str | None, argv: Sequence[str], **flags: str) -> Options:
    """Read the command line; `flags` are the help texts of those of `_FLAGS` that a step has beside `_HELP`."""
    wants_help = not {"-h", "--help"}.isdisjoint(argv)
    parser = argparse.ArgumentParser(
        prog=os.environ.get(COMMAND_NAME),
        description=doc,
        epilog="settings (in the YAML file, or --set for one run; docs/glossary.md explains the terms):\n"
        + (help_text(step.config_class) if wants_help else ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # "--re" must not mean --redo
    )
    path_help = f"YAML file with the settings (default {step.config_name})"
    set_help = "override one setting for this run, e.g. --set lr=3e-4; repeatable"
    default = Path(step.config_name)
    parser.add_argument("--config", dest="config_path", type=Path, default=default, metavar="PATH", help=path_help)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=set_help)
    for name, text in {**_HELP, **flags}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", help=text, **_FLAGS[name])
    return Options(**vars(parser.parse_args(argv)), again=again(argv))


def run(step: Step, work: Callable[[Any, Options], None], doc: str | None, argv: Sequence[str], **flags: str) -> int:
    """Load the configuration, do a step's work, and return its exit code; errors are printed on stderr.

    `doc` and `flags` are the help of the step and of its flags, as in `parse`.
    """
    options = parse(step, doc, argv, **flags)
    path = options.config_path
    return guarded(lambda: work(load(step.config_class, path, options.overrides), options), options.again)


def next_command(
    step: Step,
    options: Options,
    config: Settings,
    made: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> str:
    """The command of `step` that continues from this one, whose configuration is `config`.

    What was given by ``--set`` is passed on if that step has the setting. `made` are settings that name the outputs of
    this step; they are passed on together unless the next step's file already names the first, or something inside it.
    """
    own_name = next(name for name, config_class in FILES.items() if isinstance(config, config_class))
    path = _config_beside(options.config_path, own_name, step.config_name)
    # Step 1's seed is not the seed of a run.
    known = (DataSettings if step is TOKENIZE else step.config_class).model_fields
    passed_on = [text for text in options.overrides if text.partition("=")[0].strip() in known]
    if made and not _names(step, path, *next(iter(made.items()))):
        passed_on += [f"{key}={_as_yaml(value)}" for key, value in made.items()]
    words = [step.runner, str(_folder() / step.script), *flags]
    words += [] if str(path) == step.config_name else ["--config", str(path)]
    return shlex.join([*words, *(word for text in passed_on for word in ("--set", text))])


def again(argv: Sequence[str], without: Sequence[str] = ()) -> str:
    """The command that was typed, without some flags; `SAME_COMMAND` if it is not known."""
    script, module = _called(), getattr(sys.modules["__main__"], "__spec__", None)
    if script is not None:
        called = [next(step.runner for step in STEPS if step.script == script.name), str(script)]
    elif module is not None and module.name == "zerokara.steps.__main__":
        called = ["python", "-m", "zerokara.steps", sys.argv[1]]
    else:
        return SAME_COMMAND
    return shlex.join([*called, *(word for word in argv if word not in without)])


def _called() -> Path | None:
    """The numbered script that started this process."""
    script = Path(os.environ.get(COMMAND_NAME, sys.argv[0]).removeprefix("bash "))
    return script if script.name in {step.script for step in STEPS} else None


def _folder() -> Path:
    """The folder of the numbered scripts, as the user wrote it."""
    script = _called()
    return script.parent if script else Path()


def _config_beside(path: Path, own: str, other: str) -> Path:
    """The next step's file of the same set, ``ja_convert_config.yaml`` for ``ja_config.yaml``, or the default one."""
    if own == other:
        return path
    candidates = [Path(other), _folder() / other]  # the current folder may have none
    if path.name.endswith(own):
        candidates.insert(0, path.with_name(path.name.removesuffix(own) + other))
    return next((name for name in candidates if name.is_file()), Path(other))


def _names(step: Step, config_path: Path, key: str, made: str) -> bool:
    """Whether the configuration file of `step` names what was made, or something inside it."""
    try:
        named = getattr(load(step.config_class, config_path), key)
    except UserError:  # that step will report it
        return False
    return Path(named).resolve().is_relative_to(Path(made).resolve())


def _as_yaml(text: str) -> str:
    """A text as ``--set`` reads it: in quotes if YAML would take it for something else."""
    try:
        if read_value(text) == text:
            return text
    except YAMLError:
        pass
    return json.dumps(text, ensure_ascii=False)
