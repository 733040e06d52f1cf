"""Configuration object → commented YAML, and the help text of a step: both from docstrings."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from ruamel.yaml import YAML

from zerokara.config.settings import Settings


def as_yaml(config: Settings) -> str:
    """YAML text that loads again to an equal object, grouped, each key under its docstring."""
    lines: list[str] = []
    for group, keys in _groups(type(config)):
        lines += ["", f"# {'─' * 3} {_heading(group)} {'─' * max(3, 100 - len(_heading(group)))}"]
        for key in keys:
            lines += [f"# {line}" for line in textwrap.wrap(_doc(type(config), key), 108)]
            lines.append(f"{key}: {_value_text(getattr(config, key))}".replace(": \n", ":\n"))
    return "\n".join(lines).lstrip("\n") + "\n"


def help_text(config_class: type[Settings]) -> str:
    """Every setting with its default and meaning."""
    lines = []
    for group, keys in _groups(config_class):
        lines.append(f"\n{_heading(group)}")
        for key in keys:
            default = config_class.model_fields[key].get_default(call_default_factory=True)
            lines.append(f"  {key}: {_value_text(default)}")
            lines += textwrap.wrap(_doc(config_class, key), 100, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def _groups(config_class: type[Settings]) -> Iterator[tuple[type[Settings], list[str]]]:
    """The component classes of a configuration and the keys of each, in the order of the file (Python's lookup order
    reversed); a key that a later class changes stays where it was."""
    seen: set[str] = set()
    for group in reversed(config_class.__mro__):
        if isinstance(group, type) and issubclass(group, Settings):
            keys = [key for key in _own_fields(group) if key not in seen]
            seen.update(keys)
            if keys:
                yield group, keys


def _heading(group: type[Settings]) -> str:
    return (group.__doc__ or "").rstrip(".")


def _own_fields(group: type[Settings]) -> list[str]:
    return [key for key in vars(group).get("__annotations__", {}) if key in group.model_fields]


def _doc(config_class: type[Settings], key: str) -> str:
    return " ".join((config_class.model_fields[key].description or "").split())


def _value_text(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        return "".join(f"\n  - {_value_text(item)}" for item in value)  # a line for each mapping in a list
    if isinstance(value, BaseModel):
        given = {key: item for key in type(value).model_fields if (item := getattr(value, key)) is not None}
        return "{" + ", ".join(f"{key}: {_value_text(item)}" for key, item in given.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(_value_text(item) for item in value) + "]"
    yaml = YAML(typ="rt")
    yaml.width = 10_000
    yaml.default_flow_style = True  # what can stand in [a, b] can stand anywhere
    stream = io.StringIO()
    yaml.dump([value], stream)  # a bare scalar would be followed by an end mark
    return stream.getvalue().strip()[1:-1]
