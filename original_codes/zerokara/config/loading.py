"""YAML file → frozen configuration object, strictly: one error that lists every fault with file and line.

Pure: it reads that one file and nothing else. YAML 1.2, so that ``6e-4`` is a number and ``no`` is a word.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode
from ruamel.yaml.reader import ReaderError

from zerokara.config import other_names, plain_yaml
from zerokara.config.settings import Origin, Settings
from zerokara.errors import Fault, UserError, shown

_Config = TypeVar("_Config", bound=Settings)
_MAX_UNKNOWN = 50
"""Unknown settings that are named one by one; a file with more is something else."""


def load(config_class: type[_Config], path: str | Path, overrides: Sequence[str] = ()) -> _Config:
    """Load and check a YAML file; `overrides` are ``key=value`` texts whose values are read as YAML.

    Raises:
        UserError: with every fault: no such file, syntax, duplicate or unknown key, wrong type or range, broken rule.
    """
    faults: list[Fault] = []
    values, lines = _read_file(Path(path), faults)
    overridden = _apply(overrides, values, faults)
    origin = Origin(str(path), lines, frozenset(overridden))

    unknown = [key for key in values if key not in config_class.model_fields]
    if unknown:
        _check_is_the_file(path, lines.keys() & values.keys(), unknown, config_class)
    for key in unknown:
        faults.append(_unknown(key, values.pop(key), config_class, origin))
    wrong: set[str] = set()
    try:
        config = config_class(**values)
    except ValidationError as error:
        by_key: dict[str, list[ErrorDetails]] = {}
        for detail in error.errors():
            by_key.setdefault(_key_of(detail), []).append(detail)
            wrong.add(str(detail["loc"][0]))
        faults.extend(_invalid(key, details, origin, config_class) for key, details in by_key.items())
        # Every setting has a default: with it in place of the wrong values, the rules can check the valid ones.
        config = config_class(**{key: value for key, value in values.items() if key not in wrong})
    config._origin = origin
    broken = list(config.rule_faults(wrong))
    faults.extend(_causes(broken, config_class, path, origin) if overridden else broken)
    if faults:
        raise UserError(sorted(faults, key=lambda fault: lines.get(fault.key or "", 0)))
    return config


def _check_is_the_file(path: str | Path, keys: Set[str], unknown: Sequence[str], config_class: type[Settings]) -> None:
    """Check that a file with `unknown` settings is not another step's: that is one fault, and not one a line.

    Raises:
        UserError: it is.
    """
    meant = other_names.better_fit(keys, config_class)
    if meant:
        own = other_names.file_of(config_class)
        rule = f"holds the settings of {meant.steps} ({meant.name}), not those of {own.steps} ({own.name})"
        raise UserError(Fault(str(path), rule, remedy=f"name the right file, e.g. --config {own.name}"))
    if len(unknown) > _MAX_UNKNOWN:
        rule = f"has {len(unknown):,} unknown settings, beginning with {', '.join(unknown[:5])}"
        raise UserError(Fault(str(path), rule, remedy="is it the right file for this step?"))


def _causes(broken: list[Fault], config_class: type[Settings], path: str | Path, origin: Origin) -> Iterator[Fault]:
    """The broken rules; those that the file breaks by itself do not cite the command line."""
    in_file: set[tuple[str | None, str]] = set()
    if broken:
        try:
            load(config_class, path)
        except UserError as error:
            in_file = {(fault.key, fault.rule) for fault in error.faults}
    for fault in broken:
        yield replace(fault, where=origin.where(fault.key or "")) if (fault.key, fault.rule) in in_file else fault


def _read_file(path: Path, faults: list[Fault]) -> tuple[dict[str, Any], dict[str, int]]:
    try:
        text = plain_yaml.text_of(path)
    except FileNotFoundError:
        raise UserError(
            Fault(where=str(path), rule="there is no such configuration file", remedy="name one with --config PATH")
        ) from None
    try:
        root = plain_yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        line = mark.line + 1 if mark else 1
        remedy = _quoting(text[mark.index :]) if mark else ""
        if isinstance(error, plain_yaml.NotPlainError):
            rule = str(error.problem)
        else:
            rule, remedy = f"is not valid YAML: {error.problem}", remedy or "write `key: value`"
        raise UserError(Fault(where=f"{path}:{line}", rule=rule, remedy=remedy)) from error
    except YAMLError as error:
        raise UserError(Fault(where=str(path), rule=f"is not valid YAML: {error}")) from error
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    if root is None:
        return values, lines
    if not isinstance(root, MappingNode):
        raise UserError(Fault(where=f"{path}:1", rule="must be a list of `key: value` lines"))
    _note_lines(root, "", str(path), lines, faults)
    for key_node, value_node in root.value:
        key = str(key_node.value)
        try:
            values[key] = plain_yaml.value(value_node)
        except YAMLError as error:
            rule = f"is not a YAML value ({getattr(error, 'problem', None) or error})"
            faults.append(Fault(f"{path}:{lines[key]}", rule, key, remedy="put it in quotes if it is meant as text"))
    return values, lines


def _note_lines(node: Node, place: str, path: str, lines: dict[str, int], faults: list[Fault]) -> None:
    """Note the line of each value, nested ones as ``key[1].name``; a name that is given twice is a fault."""
    if isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            lines[f"{place}[{index}]"] = item.start_mark.line + 1
            _note_lines(item, f"{place}[{index}]", path, lines, faults)
    elif isinstance(node, MappingNode):
        kept = []
        for key_node, value_node in node.value:
            key = f"{place}.{key_node.value}" if place else str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in lines:
                rule = f"is set twice, first in line {lines[key]}"
                faults.append(Fault(where=f"{path}:{line}", key=key, rule=rule, remedy="keep one"))
                continue
            kept.append((key_node, value_node))
            lines[key] = line
            _note_lines(value_node, key, path, lines, faults)
        node.value = kept


def _apply(overrides: Sequence[str], values: dict[str, Any], faults: list[Fault]) -> set[str]:
    overridden = set()
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            faults.append(Fault(where="--set", value=text, rule="must be key=value", remedy="e.g. --set lr=3e-4"))
            continue
        try:
            # The shell takes the quotes of --set init_from='': nothing is the empty text, as '' in the file.
            values[key] = plain_yaml.read_value(value) if value.strip() else ""
            overridden.add(key)
        except ReaderError:
            rule = "must be UTF-8 text without control characters"
            remedy = "name such a file by its folder, or by a pattern"
            faults.append(Fault("--set", rule, key, value=shown(value), remedy=remedy))
        except YAMLError as error:
            reason = getattr(error, "problem", None) or error
            remedy = _quoting(value)
            faults.append(Fault("--set", f"is not a YAML value ({reason})", key, value=value, remedy=remedy))
    return overridden


def _quoting(rest: str) -> str:
    """The remedy for a value that begins with a reserved character of YAML: ``@files.txt``, ``*.jsonl``, ``%``."""
    word = rest.split(maxsplit=1)[0].rstrip(",]") if rest.strip() else ""
    return f'put it in quotes: "{word}"' if word[:1] in ("@", "`", "*", "&", "%", "!") else ""


def _unknown(key: str, value: object, config_class: type[Settings], origin: Origin) -> Fault:
    root = re.split(r"[.\[]", key)[0]
    if root != key and root in config_class.model_fields:  # --set stages[1].order=…
        rule = "a part of a value cannot be set by itself"
        remedy = f"set the whole of it (--set '{root}=[…]'), or edit it in the file"
    else:
        rule, remedy = "there is no such setting", other_names.remedy_for(key, config_class)
    return Fault(where=origin.where(key), key=key, value=value, rule=rule, remedy=remedy)


def _key_of(detail: ErrorDetails) -> str:
    """``lr``, or for a fault inside an item of a list of mappings ``stages[1].order`` or ``stages[1]``."""
    location = detail["loc"]
    key = str(location[0])
    if len(location) > 1 and isinstance(location[1], int):
        if len(location) > 2:
            return f"{key}[{location[1]}].{location[2]}"
        if detail["type"] == "model_type":
            return f"{key}[{location[1]}]"
    return key


def _item_keys(key: str, config_class: type[Settings]) -> list[str]:
    """The keys that an item of a list of mappings may have; `key` is one of an item, ``stages[1].order``."""
    item, *_ = get_args(config_class.model_fields[key.partition("[")[0]].annotation)
    return list(item.model_fields)


def _invalid(key: str, details: list[ErrorDetails], origin: Origin, config_class: type[Settings]) -> Fault:
    if details[0]["type"] == "extra_forbidden":
        known = _item_keys(key, config_class)
        near = difflib.get_close_matches(key.rpartition(".")[2], known, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        return Fault(origin.where(key), "there is no such setting", key, value=details[0]["input"], remedy=remedy)
    # A union (`a number or "auto"`) reports one error for each of its members: they are alternatives.
    rules = list(dict.fromkeys(_rule_text(detail) for detail in details))
    value = details[0]["input"]
    hint = ""
    if isinstance(value, str) and any("number" in rule for rule in rules):
        hint = "write a number without quotes or units"
    if isinstance(value, str) and value.lower() in ("yes", "no", "on", "off") and "true or false" in " ".join(rules):
        hint = f"write {'true' if value.lower() in ('yes', 'on') else 'false'}"
    if details[0]["type"] == "string_pattern_mismatch":
        value = shown(value)
    value = list(value) if isinstance(value, tuple) else value
    return Fault(where=origin.where(key), key=key, value=value, rule="must be " + " or ".join(rules), remedy=hint)


_RULES = {
    "missing": "given",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "string_pattern_mismatch": "text without control characters (line ends, escapes)",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "model_type": "a mapping (name: value, …)",
    "greater_than": "greater than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "multiple_of": "a multiple of {multiple_of:g}",
    "literal_error": "{expected}",
    "too_short": "a list of at least {min_length}",
}


def _rule_text(detail: ErrorDetails) -> str:
    template = _RULES.get(detail["type"])
    if template is None:
        return f"valid ({detail['msg']})"
    rule_text = template.format(**detail.get("ctx", {}))
    if len(detail["loc"]) > 2 and str(detail["loc"][-2]).startswith("tuple["):  # one member of a union
        return f"a list in which each is {rule_text}"
    return rule_text
