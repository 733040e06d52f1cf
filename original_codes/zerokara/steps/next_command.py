"""What a step says to type next, such that it is right when pasted.

Every command is quoted for the shell, names the configuration file that belongs to this one, and is about what this
step made: a key is handed on with ``--set`` where the next step reads it and its file says something else.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml.error import YAMLError

from zerokara.config import plain_yaml
from zerokara.config.convert_config import ConvertConfig
from zerokara.config.data_settings import DataSettings
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.settings import Settings
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.errors import UserError
from zerokara.steps.options import SAME_COMMAND, Options

COMMAND_NAME = "ZEROKARA_COMMAND"
"""Environment variable in which the shell scripts say under which name the user called them."""


@dataclass(frozen=True)
class Step:
    """A numbered script, and the configuration that it reads."""

    runner: str
    script: str
    config_class: type[Settings]
    config_name: str
    """The file that it reads unless another is named."""
    needed_keys: frozenset[str]
    """The settings that it needs."""


_TRAINING_KEYS = frozenset(PretrainConfig.model_fields) - {"num_workers"}
_UPLOAD_KEYS = frozenset({"output_tokenizer_and_model_dir", "huggingface_name", "private"})

TRAIN_TOKENIZER = Step(
    "python",
    "1_train_sentencepiece_tokenizer.py",
    TokenizerConfig,
    "sentence_piece_config.yaml",
    frozenset(TokenizerConfig.model_fields),
)
TOKENIZE = Step("bash", "2_tokenize.sh", PretrainConfig, "config.yaml", frozenset(DataSettings.model_fields))
COUNT_TOKENS = Step("python", "count_tokens.py", PretrainConfig, "config.yaml", _TRAINING_KEYS)
TRAIN = Step("bash", "3_train_node1.sh", PretrainConfig, "config.yaml", _TRAINING_KEYS)
CONVERT = Step(
    "bash", "4_convert_to_HF.sh", ConvertConfig, "convert_config.yaml", frozenset(ConvertConfig.model_fields)
)
UPLOAD = Step("python", "6_upload.py", ConvertConfig, "convert_config.yaml", _UPLOAD_KEYS)
STEPS = (TRAIN_TOKENIZER, TOKENIZE, COUNT_TOKENS, TRAIN, CONVERT, UPLOAD)


def render(
    step: Step,
    options: Options,
    own_name: str,
    config: Settings,
    made: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> str:
    """The command of `step` that goes on from this one.

    `own_name` is the default name of this step's configuration file, `config` what was loaded from it. `made` are keys
    that name what this step made; they are handed on together unless the next step's file names the first of them, or
    something inside it, already.
    """
    path = _config_beside(options.config_path, own_name, step.config_name)
    try:
        there: Settings | None = load(step.config_class, path)
    except UserError:  # the next step will say so
        there = None
    given = {text.partition("=")[0]: text for text in options.overrides}
    needed = step.needed_keys
    handed_on = [
        text
        for key, text in given.items()
        if key in needed and (there is None or getattr(there, key) != getattr(config, key))
    ]
    if made:
        first = next(iter(made))
        if there is None or not _lies_in(getattr(there, first), made[first]):
            handed_on += [f"{key}={_as_yaml(value)}" for key, value in made.items()]
    words = [step.runner, str(_folder() / step.script), *flags]
    words += [] if str(path) == step.config_name else ["--config", str(path)]
    return shlex.join([*words, *(word for text in handed_on for word in ("--set", text))])


def again(argv: Sequence[str], without: Sequence[str] = ()) -> str:
    """The command that was typed, less some flags; `SAME_COMMAND` where that is not known."""
    script, module = _called(), getattr(sys.modules["__main__"], "__spec__", None)
    if script is not None:
        called = [next(step.runner for step in STEPS if step.script == script.name), str(script)]
    elif module is not None and module.name.startswith("zerokara."):
        called = ["python", "-m", module.name.removesuffix(".__main__")]
    else:
        return SAME_COMMAND
    return shlex.join([*called, *(word for word in argv if word not in without)])


def _called() -> Path | None:
    """The numbered script by which this process was called."""
    script = Path(os.environ.get(COMMAND_NAME, sys.argv[0]).removeprefix("bash "))
    return script if script.name in {step.script for step in STEPS} else None


def _folder() -> Path:
    """Where the numbered scripts lie, as the user wrote it."""
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
    there = (Path(other), _folder() / other)  # one who works in a folder of their own may have none
    return next((name for name in there if name.is_file()), Path(other))


def _lies_in(path: str, folder: str) -> bool:
    return Path(path).resolve().is_relative_to(Path(folder).resolve())


def _as_yaml(text: str) -> str:
    """A text as ``--set`` reads it back: in quotes where YAML would take it for something else."""
    try:
        if plain_yaml.read_value(text) == text:
            return text
    except YAMLError:
        pass
    return json.dumps(text, ensure_ascii=False)
