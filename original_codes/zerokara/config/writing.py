"""Configuration object → commented YAML, and the help of a step: both from docstrings. Changes of a user's file."""

import ast
import inspect
import io
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import CollectionNode, MappingNode

from zerokara.base.durable import write_file
from zerokara.base.errors import RunError
from zerokara.config.loading import load, read_value
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.settings import Settings

FIRST_HEADING = "First: what most people change"
_MISREAD = re.compile('"[?]|[\x85\u2028\u2029]')
"""What ruamel writes unquoted and reads back as something else: a text that begins with ?, and Unicode's line ends."""
_LINE_ENDS = {0x85: "\\x85", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def as_yaml(config: Settings) -> str:
    """Return YAML text that loads again to an equal object, grouped, each key under its docstring."""
    lines: list[str] = []
    for heading, docs in _groups(type(config)):
        lines += ["", f"# {'─' * 3} {heading} {'─' * max(3, 100 - len(heading))}"]
        for key, doc in docs.items():
            lines += [f"# {line}" for line in textwrap.wrap(doc, 108)]
            lines.append(f"{key}: {value_text(getattr(config, key))}".replace(": \n", ":\n"))
    return "\n".join(lines).lstrip("\n") + "\n"


def help_text(config_class: type[Settings]) -> str:
    """Return every setting with its default and meaning."""
    lines = []
    for heading, docs in _groups(config_class):
        lines.append(f"\n{heading}")
        for key, doc in docs.items():
            default = config_class.model_fields[key].get_default(call_default_factory=True)
            lines.append(f"  {key}: {value_text(default)}")
            lines += textwrap.wrap(doc, 100, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def _groups(config_class: type[Settings]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the headings of the file, and the keys under each with their docstrings: `first`, then each component.

    A key that a subclass overrides stays in its place. If the subclass gives it no docstring, it takes that of the
    first class, without the sentence about `auto`.
    """
    docs: dict[str, str] = {}
    groups: dict[str, list[str]] = {FIRST_HEADING: [*config_class.first]} if config_class.first else {}
    for component in reversed(config_class.__mro__):
        if issubclass(component, Settings):
            keys = component.model_fields.keys() - docs.keys()
            new = [key for key in vars(component).get("__annotations__", {}) if key in keys]
            for key in new:
                own = next(each for each in config_class.__mro__ if key in vars(each).get("__annotations__", {}))
                doc = _docstrings(own).get(key) or re.sub(
                    r"[.;]\s`auto`\s.*", ".", _docstrings(component)[key], flags=re.DOTALL
                )
                docs[key] = " ".join(doc.split())
            groups[(component.__doc__ or "").rstrip(".")] = [key for key in new if key not in config_class.first]
    yield from ((heading, {key: docs[key] for key in keys}) for heading, keys in groups.items() if keys)


@cache
def _docstrings(settings_class: type) -> dict[str, str]:
    """Return the docstring below each field of a class."""
    module = ast.parse(inspect.getsource(sys.modules[settings_class.__module__]))
    classes = {node.name: node.body for node in module.body if isinstance(node, ast.ClassDef)}
    return {
        ast.unparse(field.target): str(ast.literal_eval(doc.value))
        for field, doc in pairwise(classes[settings_class.__name__])
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr)
    }


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as ``--set`` takes them."""
    return [f"{key}={value_text(value)}" for key, value in settings.items()]


def value_text(value: Any) -> str:
    """Return a value as a YAML file has it: a text in quotes where it would be read as something else."""
    if isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        return "".join(f"\n  - {value_text(item)}" for item in value)  # a line for each mapping in a list
    plain = value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value
    if _MISREAD.search(text := json.dumps(plain, ensure_ascii=False)):
        return text.translate(_LINE_ENDS)  # JSON, which is YAML
    yaml = YAML(typ="rt")
    yaml.width = 2**31
    yaml.default_flow_style = True  # what can stand in {x: a} can stand anywhere
    stream = io.StringIO()
    # A bare scalar would be followed by an end mark.
    yaml.dump({"x": plain}, stream)
    return stream.getvalue().strip().removeprefix("{x: ").removesuffix("}")


def write_values(config_path: Path, values: Mapping[str, Any], is_dry_run: bool = False) -> str:
    """Change the values of these keys in a YAML file of step 3, append those that it lacks, and nothing else.

    Returns what was done, or in a dry run would be, for display.

    Raises:
        RunError: the file would not hold the same settings with just these values; it is left as it was.
        UserError: the values break a rule.
    """
    load(PretrainConfig, config_path, overrides(values))  # a wrong value is a fault
    texts = {key: value_text(value) for key, value in values.items()}
    before = after = config_path.read_bytes().decode("utf-8")
    places = _places(before)
    for start, end, key in sorted(((*places[key], key) for key in texts if key in places), reverse=True):
        inside = re.findall(r"(?<=\s)#.*", before[start:end])  # comments within a value of several lines
        after = "\n".join([f"{after[:start]} {texts[key]}", *inside]) + after[end:]
    for key in (key for key in texts if key not in places):
        after += ("" if after.endswith("\n") or not after else "\n") + f"{key}: {texts[key]}\n"
    new, old = {key: read_value(text) for key, text in texts.items()}, read_value(before) or {}
    with suppress(YAMLError):
        if read_value(after) == old | new:
            if not is_dry_run:
                write_file(config_path, after)
            replaced = [f"{key}: {old[key]} → {texts[key]}" for key in texts if old.get(key, new[key]) != new[key]]
            told = f"{config_path}; replaced {'; '.join(replaced)}" if replaced else str(config_path)
            return f"{'dry run: would write' if is_dry_run else 'written:'} {told}"
    what = f"cannot change {', '.join(values)} without touching something else"
    by_hand = "; ".join(f"{key}: {text}" for key, text in texts.items())
    raise RunError(f"{config_path}: {what}; write by hand: {by_hand}")


def _places(text: str) -> dict[str, tuple[int, int]]:
    """Return where the value of each key stands in a YAML text: from behind its colon to the end of what it says."""
    places = {}
    for key, value in getattr(YAML(typ="safe", pure=True).compose(text), "value", ()):
        start = end = text.index(":", key.end_mark.index) + 1
        if value.start_mark.index < value.end_mark.index:
            while isinstance(value, CollectionNode) and not value.flow_style:  # its own mark is behind later comments
                value = value.value[-1][1] if isinstance(value, MappingNode) else value.value[-1]
            end = len(text[: value.end_mark.index].rstrip())
        places[key.value] = start, end
    return places
