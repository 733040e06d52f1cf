"""The next command that a step suggests, ready to paste.

Every command is quoted for the shell, names the configuration file that belongs to this one, and refers to the outputs
of this step: a setting is passed on with ``--set`` if the next step reads it and its file has another value.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml.error import YAMLError

from zerokara.config import other_names, plain_yaml
from zerokara.config.data_settings import DataSettings
from zerokara.config.loading import load
from zerokara.config.other_names import ConfigFile
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.settings import Settings
from zerokara.errors import SAME_COMMAND, UserError
from zerokara.steps.options import Options

COMMAND_NAME = "ZEROKARA_COMMAND"
"""Environment variable with the name by which the user called a shell script."""


@dataclass(frozen=True)
class Step:
    """A numbered script and its configuration."""

    runner: str
    script: str
    file: ConfigFile
    needed_keys: frozenset[str] = frozenset()
    """The settings that it needs; empty for all."""

    @property
    def config_class(self) -> type[Settings]:
        """The class of its settings."""
        return self.file.config_class

    @property
    def config_name(self) -> str:
        """Its default configuration file."""
        return self.file.name


_TRAINING_KEYS = frozenset(PretrainConfig.model_fields) - {"num_workers", "cluster", "cluster_parts"}
_UPLOAD_KEYS = frozenset({"output_tokenizer_and_model_dir", "huggingface_name", "private"})

TRAIN_TOKENIZER = Step("python", "1_train_sentencepiece_tokenizer.py", other_names.TOKENIZER)
TOKENIZE = Step("bash", "2_tokenize.sh", other_names.PRETRAIN, frozenset(DataSettings.model_fields))
COUNT_TOKENS = Step("python", "count_tokens.py", other_names.PRETRAIN, _TRAINING_KEYS)
PLAN = Step("python", "0_plan.py", other_names.PRETRAIN, _TRAINING_KEYS)
TRAIN = Step("bash", "3_train_node1.sh", other_names.PRETRAIN, _TRAINING_KEYS)
CONVERT = Step("bash", "4_convert_to_HF.sh", other_names.CONVERT)
UPLOAD = Step("python", "6_upload.py", other_names.CONVERT, _UPLOAD_KEYS)
FINETUNE = Step("bash", "7_finetune.sh", other_names.FINETUNE)
EVALUATE = Step("python", "8_evaluate.py", other_names.EVALUATE)
STEPS = (PLAN, TRAIN_TOKENIZER, TOKENIZE, COUNT_TOKENS, TRAIN, CONVERT, UPLOAD, FINETUNE, EVALUATE)


def render(
    step: Step,
    options: Options,
    own_name: str,
    config: Settings,
    made: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> str:
    """The command of `step` that continues from this one.

    `own_name` is the default name of this step's configuration file, `config` the configuration loaded from it. `made`
    are settings that name the outputs of this step; they are passed on together unless the next step's file already
    names the first of them, or something inside it.
    """
    path = _config_beside(options.config_path, own_name, step.config_name)
    try:
        following: Settings | None = load(step.config_class, path)
    except UserError:  # the next step will report it
        following = None
    given = {text.partition("=")[0]: text for text in options.overrides}
    needed: Collection[str] = step.needed_keys or step.config_class.model_fields
    passed_on = [
        text
        for key, text in given.items()
        if key in needed and (following is None or getattr(following, key) != getattr(config, key))
    ]
    if made:
        first = next(iter(made))
        if following is None or not _is_inside(getattr(following, first), made[first]):
            passed_on += [f"{key}={_as_yaml(value)}" for key, value in made.items()]
    words = [step.runner, str(_folder() / step.script), *flags]
    words += [] if str(path) == step.config_name else ["--config", str(path)]
    return shlex.join([*words, *(word for text in passed_on for word in ("--set", text))])


def again(argv: Sequence[str], without: Sequence[str] = ()) -> str:
    """The command that was typed, without some flags; `SAME_COMMAND` if it is not known."""
    script, module = _called(), getattr(sys.modules["__main__"], "__spec__", None)
    if script is not None:
        called = [next(step.runner for step in STEPS if step.script == script.name), str(script)]
    elif module is not None and module.name.startswith("zerokara."):
        called = ["python", "-m", module.name.removesuffix(".__main__")]
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
    if path.name.endswith(own):
        beside = path.with_name(path.name.removesuffix(own) + other)
        if beside.is_file():
            return beside
    candidates = (Path(other), _folder() / other)  # the current folder may have none
    return next((name for name in candidates if name.is_file()), Path(other))


def _is_inside(path: str, folder: str) -> bool:
    return Path(path).resolve().is_relative_to(Path(folder).resolve())


def _as_yaml(text: str) -> str:
    """A text as ``--set`` reads it: in quotes if YAML would take it for something else."""
    try:
        if plain_yaml.read_value(text) == text:
            return text
    except YAMLError:
        pass
    return json.dumps(text, ensure_ascii=False)
