"""Change values in a configuration file of the user's, and nothing else: comments and layout stay."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.durable import write_text
from zerokara.errors import RunError, UserError

Value = int | float | str


def write_values(config_path: Path, values: Mapping[str, Value]) -> None:
    """Change the values of these keys in a YAML file of step 3, append those that it lacks, and nothing else.

    Raises:
        RunError: the file does not load to the same configuration with just these values; it is left as it was.
    """
    after = config_path.read_bytes().decode("utf-8")
    for key, value in values.items():
        after = _with_value(after, key, _as_yaml(value))
    trial = config_path.with_name(config_path.name + ".trial.partial")
    expected = load(PretrainConfig, config_path, [f"{key}={_as_yaml(value)}" for key, value in values.items()])
    try:
        trial.write_bytes(after.encode("utf-8"))
        as_expected = load(PretrainConfig, trial).model_dump() == expected.model_dump()
    except UserError:
        as_expected = False
    finally:
        trial.unlink(missing_ok=True)
    if not as_expected:
        raise RunError(
            f"{config_path}: cannot change {', '.join(values)} without touching something else; write by hand: "
            + "; ".join(f"{key}: {_as_yaml(value)}" for key, value in values.items())
        )
    write_text(config_path, after)


def _with_value(text: str, key: str, value: str) -> str:
    pattern = re.compile(rf"""^({re.escape(key)}[ \t]*:[ \t]*)("[^"\n]*"|'[^'\n]*'|[^\s#]+)?""", re.MULTILINE)
    if pattern.search(text):
        return pattern.sub(lambda match: f"{match[1].rstrip()} {value}", text, count=1)
    return text + ("" if text.endswith("\n") or not text else "\n") + f"{key}: {value}\n"


def _as_yaml(value: Value) -> str:
    """A scalar as our YAML reads it back; `''` is the empty text."""
    return repr(value) if isinstance(value, int | float) else value or "''"
