"""YAML file → frozen configuration object, strictly: one error that lists every fault with file and line.

YAML 1.2, so that ``6e-4`` is a number and ``no`` is a word. A file may come from anywhere, so it holds names and values
that are written out: a tag (``!!python/object``) could make an object, and a few lines of aliases expand to gigabytes.
"""

import difflib
import os
import re
import stat
from collections.abc import Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from zerokara.base.errors import Fault, UserError, nearest, shown
from zerokara.config.clean_config import CleanConfig
from zerokara.config.convert_config import ConvertConfig
from zerokara.config.evaluate_config import EvaluateConfig
from zerokara.config.finetune_config import FinetuneConfig, FinetuneRunConfig
from zerokara.config.pretrain_config import PretrainConfig, RunConfig
from zerokara.config.settings import TEXT_PATTERN, Origin, Settings, key_of
from zerokara.config.tokenizer_config import TokenizerConfig

FILES: dict[str, type[Settings]] = {
    "clean_config.yaml": CleanConfig,
    "sentence_piece_config.yaml": TokenizerConfig,
    "finetune_config.yaml": FinetuneConfig,
    "convert_config.yaml": ConvertConfig,
    "evaluate_config.yaml": EvaluateConfig,
    "config.yaml": PretrainConfig,
}
"""Settings of each file. A set in `model_configs/` has a prefix before the name; the last ends all the others."""
_PATHS = {
    "add_to_card", "base_tokenizer", "chat_template", "compare_with", "deepspeed_template", "evaluation_data",
    "init_from", "input_model_dir", "input_tokenizer_file", "models", "output_dir", "output_model_dir", "output_prefix",
    "output_tokenizer_and_model_dir", "teachers",
}  # fmt: skip
"""Settings in which ``~`` is the home folder, as in a shell; entries of the corpus are expanded by `corpus.find`."""
RESOLVED_NAME = "config_resolved.yaml"  # in a run folder: all settings of its newest start
GONE = {"resize_vocabulary", "embedding_tokens", "max_hours_per_start"}
"""Settings that runs of earlier versions have recorded, and that nothing reads any more."""

_Config = TypeVar("_Config", bound=Settings)
_MAX_BYTES = 256 * 1024  # the shipped files have 16 kB with their comments
_MAX_LEVELS = 8  # no setting has more than four
_SYNTAX = "write `key: value`, spaces in place of tabs, and quotes around a text that begins with @, `, *, &, % or !"
_MAX_UNKNOWN = 50  # with more of them, the error asks whether this is the right file
_RENAMED = {
    "learning_rate": "lr",
    "train_iters": "max_steps",
    "batch_size": "global_batch_size",
    "clip_grad": "gradient_clipping",
    "num_gpus": "num_processes",
    "fp16": "precision",
    "data_path": "output_prefix",
    "model_prefix": "output_dir",
    "resize_vocabulary": "new_embeddings",
}
"""Names in other programs, or earlier ones here, that are spelt too differently to be found by their letters."""


def load(
    config_class: type[_Config], path: str | Path, overrides: Sequence[str] = (), named_by: str = "--config PATH"
) -> _Config:
    """Load and check a YAML file; `overrides` are ``key=value`` texts whose values are read as YAML.

    Raises:
        UserError: with every fault: no such file, syntax, duplicate or unknown key, wrong type or range, broken rule.
    """
    faults: list[Fault] = []
    values, lines = _read_file(Path(path), faults, named_by)
    _check_is_the_file(path, values.keys(), config_class)
    if Path(path).name == RESOLVED_NAME:
        values = {key: value for key, value in values.items() if key not in GONE}
    in_file = dict(values)
    origin = Origin(str(path), lines, frozenset(_apply(overrides, values, faults)), in_file)
    values = {key: _at_home(value) if key in _PATHS else value for key, value in values.items()}
    wrong: set[str] = set()
    try:
        config = config_class(**values)
    except ValidationError as error:
        by_place: dict[str, list[ErrorDetails]] = {}
        for detail in error.errors():
            wrong.add(str(detail["loc"][0]))
            by_place.setdefault(_place_of(detail, values), []).append(detail)
        faults += [_invalid(*each, config_class, origin) for each in by_place.items()]
        # Every setting has a default: with it in place of the wrong values, the rules can check the valid ones.
        config = config_class(**{key: value for key, value in values.items() if key not in wrong})
    config._origin = origin
    faults += config.rule_faults(wrong)
    if faults:
        raise UserError(sorted(faults, key=lambda fault: lines.get(fault.key or "", 0)))
    return config


def kind_of(path: str | Path) -> type[Settings]:
    """Tell whose settings a YAML file holds, whatever its name. Raises UserError if it cannot be read."""
    keys = _read_file(Path(path), [])[0].keys()
    return max(FILES.values(), key=lambda each: len(keys & each.model_fields.keys()))


def load_run(path: Path) -> RunConfig:
    """Load the settings of a run, a pretraining or a fine-tuning, from its folder. Raises as `load`."""
    is_pretraining = "train_data" not in _read_file(path, [])[0]
    return load(PretrainConfig if is_pretraining else FinetuneRunConfig, path)


def text_of(path: Path, named_by: str) -> str:
    """Read the text of a settings file, which is named by an option or a setting.

    Raises:
        UserError: the file does not exist, is too large, or cannot be read as UTF-8.
    """
    try:
        with open(path, "rb") as file:
            if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
                raise UserError(Fault(str(path), "is a pipe, which can be read once", remedy="write it into a file"))
            content = file.read(_MAX_BYTES + 1)
        if len(content) <= _MAX_BYTES:
            return content.decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        remedy = nearest(path, f"name one with {named_by}")
        raise UserError(Fault(shown(path), "there is no such file", remedy=remedy)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(Fault(str(path), f"cannot be read as UTF-8 text ({error})")) from error
    rule = f"is larger than {_MAX_BYTES // 1024} kB, as no configuration is"
    raise UserError(Fault(str(path), rule, remedy="name many files by a folder, a glob or a list"))


def read_value(text: str) -> Any:
    """Read the value of a YAML text, None of an empty one. Raises YAMLError if it is not YAML, or has a tag."""
    node = _yaml().compose(text)
    return None if node is None else _value(node)


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.max_depth = _MAX_LEVELS
    return yaml


def _value(node: Node) -> Any:
    _keep_keys(node)
    try:
        return _yaml().constructor.construct_object(node, deep=True)
    except ValueError as error:  # a date in the 13th month
        raise YAMLError(str(error)) from error


def _keep_keys(node: Node) -> None:
    """Let each key be its text as it is written: a label ``01`` or ``True`` is none of YAML's numbers."""
    for each in node.value if isinstance(node, SequenceNode | MappingNode) else ():
        key, value = each if isinstance(node, MappingNode) else (None, each)
        if isinstance(key, ScalarNode):
            key.tag = "tag:yaml.org,2002:str"
        _keep_keys(value)


def _problem(error: YAMLError) -> str:
    return getattr(error, "problem", None) or str(error).partition("\n")[0]


def _read_file(
    path: Path, faults: list[Fault], named_by: str = "--config PATH"
) -> tuple[dict[str, Any], dict[str, int]]:
    """Read the values of a file, and the line of each, nested ones as ``key[1].name``."""
    text = text_of(path, named_by)
    text = text.replace("\t", " ") if path.suffix == ".json" else text  # which is YAML but for its tabs
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    try:
        root = _yaml().compose(text) or MappingNode("", [])
        if not isinstance(root, MappingNode):
            raise UserError(Fault(where=f"{path}:1", rule="must be a list of `key: value` lines"))
        _note_lines(root, "", str(path), lines, faults)
    except YAMLError as error:
        mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        is_json = path.suffix == ".json"
        rule = f"is not {'JSON' if is_json else 'plain YAML'}: {_problem(error)}"
        remedy = "look for a brace, a quotation mark or a comma that is missing" if is_json else _SYNTAX
        raise UserError(Fault(where, rule, remedy=remedy)) from error
    for key_node, value_node in root.value:
        key = str(key_node.value)
        try:
            values[key] = _value(value_node)
        except YAMLError as error:
            rule = f"is not a YAML value ({_problem(error)})"
            faults.append(Fault(f"{path}:{lines[key]}", rule, key, remedy="put it in quotes if it is meant as text"))
    return values, lines


def _note_lines(node: Node, place: str, path: str, lines: dict[str, int], faults: list[Fault]) -> None:
    """Note the line of each value, nested ones as ``key[1].name``; a name that is given twice is a fault."""
    if node.anchor is not None:
        problem = "an anchor (&) or alias (*); write the value out"
        raise MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    if isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            lines[f"{place}[{index}]"] = item.start_mark.line + 1
            _note_lines(item, f"{place}[{index}]", path, lines, faults)
    elif isinstance(node, MappingNode):
        kept = []
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                problem = "a list or a mapping as a key; a key is a word"
                raise MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
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
    """Put the values of the command line in place of the file's; return their keys."""
    overridden = set()
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            faults.append(Fault(where="--set", value=text, rule="must be key=value", remedy="e.g. --set lr=3e-4"))
            continue
        try:
            # The shell takes the quotes of --set init_from='': nothing is the empty text, as '' in the file.
            values[key] = read_value(value) if value.strip() else ""
            overridden.add(key)
            if (comment := re.search(r"\s#", value)) and _means(value[: comment.start()], values[key]):
                rule, remedy = "is a YAML comment from # on", f'put the value in quotes: {key}="{value}"'
                faults.append(Fault("--set", rule, key, value, remedy))
        except YAMLError as error:
            faults.append(Fault("--set", f"is not a YAML value ({_problem(error)})", key, shown(value), _SYNTAX))
    return overridden


def _means(text: str, value: Any) -> bool:
    """Tell whether a YAML text has this value."""
    with suppress(YAMLError):
        return bool(read_value(text) == value)
    return False


def _at_home(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_at_home, value)]
    return os.path.expanduser(value) if isinstance(value, str) else value


def _check_is_the_file(path: str | Path, keys: Set[str], config_class: type[Settings]) -> None:
    """Check that a file is not another step's, or something else; raise one fault, not one a line."""
    num_known = {each: len(keys & each.model_fields.keys()) for each in (config_class, *FILES.values())}
    best = max(FILES, key=lambda name: num_known[FILES[name]])
    if num_known[FILES[best]] > num_known[config_class] and config_class.unknown == Settings.unknown:
        own = next((name for name, each in FILES.items() if each is config_class), RESOLVED_NAME)
        rule = f"holds the settings of {best}, not those of {own}"
        raise UserError(Fault(str(path), rule, remedy=f"name the right file: --config {own}"))
    if len(keys) - num_known[config_class] > _MAX_UNKNOWN:
        rule = f"holds {len(keys):,} settings, most of them unknown"
        raise UserError(Fault(str(path), rule, remedy="is it the right file for this step?"))


def _place_of(detail: ErrorDetails, values: Any) -> str:
    """Return the place of an error: ``stages[1].order``, ``rope_scaling.factor``; among `values`, as they were read."""
    place, is_of_item = "", detail["type"] in ("model_type", "extra_forbidden", "missing")
    for part in detail["loc"]:  # keys, indices, and names of types among alternatives
        if isinstance(values, dict) and (part in values or detail["type"] == "missing" or not place):
            place, values = f"{place}.{part}" if place else str(part), values.get(part)
        elif isinstance(values, list) and isinstance(part, int) and (isinstance(values[part], dict) or is_of_item):
            place, values = f"{place}[{part}]", values[part]
    return place


def _unknown(place: str, detail: ErrorDetails, config_class: type[Settings], origin: Origin) -> Fault:
    """Return the fault of a name that is no setting, in the file or within a value (``stages[1].ordr``)."""
    remedy, holder = "remove it", config_class
    *parents, name = [place] if len(detail["loc"]) == 1 else re.sub(r"\[\d+\]", "", place).split(".")
    for parent in parents:
        annotation = holder.model_fields[parent].annotation
        holder = next(each for each in (annotation, *get_args(annotation)) if hasattr(each, "model_fields"))
    rule, known = holder.unknown, holder.model_fields
    if (root := key_of(name)) != name and root in known:  # --set stages[1].order=…
        rule = "a part of a value cannot be set by itself"
        remedy = f"set the whole of it (--set '{root}=[…]'), or edit it in the file"
    elif _RENAMED.get(name) in known:
        remedy = f"did you mean {_RENAMED[name]}?"
    elif name in GONE:
        remedy = "remove it: it is gone, and docs/CHANGELOG.md says what takes its place"
    elif rule != Settings.unknown:  # it says where such a name belongs, unless it is a slip
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        remedy = f"did you mean {near[0]}?" if near else "remove it here"
    elif not parents and (files := [file for file, each in FILES.items() if name in each.model_fields]):
        remedy = f"it belongs in {files[0]}"
    elif near := difflib.get_close_matches(name, known, n=1):
        remedy = f"did you mean {near[0]}?"
    elif parents:
        remedy = f"valid names: {', '.join(known)}"
    return Fault(origin.where(place), rule, place, detail["input"], remedy)


def _invalid(place: str, details: list[ErrorDetails], config_class: type[Settings], origin: Origin) -> Fault:
    """Return the fault of what pydantic refuses; `details` are its alternatives (`a number or "auto"`)."""
    if details[0]["type"] == "extra_forbidden":
        return _unknown(place, details[0], config_class, origin)
    rules, value = dict.fromkeys(_rule_text(detail) for detail in details), details[0]["input"]
    value = shown(value) if isinstance(value, str) else list(value) if isinstance(value, tuple) else value
    return Fault(origin.where(place), "must be " + " or ".join(rules), place, value)


_WORDS = {
    "missing": "given",
    "int_type": "a whole number (without quotes or units)",
    "int_from_float": "a whole number",
    "float_type": "a number (without quotes or units)",
    "string_type": "text (a number or a date in quotes)",
    "string_too_short": "text that is not empty",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "too_short": "a list of at least one entry",
    "model_type": "a mapping (name: value, …)",
}
"""Our words for some of pydantic's kinds of error."""


def _rule_text(detail: ErrorDetails) -> str:
    if detail["type"] == "string_pattern_mismatch":
        pattern = detail["ctx"]["pattern"]
        return "text without control characters" if pattern == TEXT_PATTERN else f"text of the form {pattern}"
    words = _WORDS.get(detail["type"], detail["msg"].removeprefix("Input should be "))
    if len(detail["loc"]) > 2 and str(detail["loc"][-2]).startswith("tuple["):  # one member of a union
        return f"a list in which each is {words}"
    return words
