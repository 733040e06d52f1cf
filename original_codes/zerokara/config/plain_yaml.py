"""The part of YAML that a configuration needs: names, and values that are written out.

A file may come from anywhere, and YAML can do more than hold settings. A tag (``!!python/object``) makes an object; a
few lines of anchors and aliases expand to gigabytes; ten thousand brackets overflow the stack. All that is refused
while the text is parsed, before anything is constructed. YAML 1.2, by ruamel.yaml 0.19.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, ScalarEvent
from ruamel.yaml.nodes import MappingNode, Node

from zerokara.errors import Fault, UserError

MAX_BYTES = 256 * 1024
"""The shipped files have 13 kB with their comments; 256 kB of settings are read in about half a second."""
MAX_LEVELS = 8
"""No setting has more than four."""
MAX_VALUES = 10_000
_MERGE_TAG = "tag:yaml.org,2002:merge"


class NotPlainError(MarkedYAMLError):
    """Valid YAML that no configuration needs; `problem` is the rule."""


class _PlainComposer(Composer):
    """Composes nodes, and refuses whatever is not plain."""

    def __init__(self, loader: Any = None):
        super().__init__(loader=loader)
        self._levels = self._values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.parser.peek_event()
        self._values += 1
        self._levels += 1
        problem = self._problem(event, is_key=isinstance(parent, MappingNode) and index is None)
        if problem:
            raise NotPlainError(problem=problem, problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self._levels -= 1
        if node.tag == _MERGE_TAG:
            raise NotPlainError(problem="has a merge key (<<); write the values out", problem_mark=event.start_mark)
        return node

    def _problem(self, event: Any, is_key: bool) -> str:
        if isinstance(event, AliasEvent) or event.anchor is not None:
            return "begins with a YAML alias (*) or anchor (&); write the value out"
        if event.tag is not None:
            return f"has a tag ({event.tag}); write the value without it"
        if is_key and not isinstance(event, ScalarEvent):
            return "has a list or a mapping as a key; a key is a word"
        if self._levels > MAX_LEVELS:
            return f"has lists or mappings in more than {MAX_LEVELS} levels; no setting has so many"
        return f"has more than {MAX_VALUES:,} values; no configuration has" if self._values > MAX_VALUES else ""


def text_of(path: Path) -> str:
    """The text of a configuration file.

    Raises:
        FileNotFoundError: there is none.
        UserError: it is too large, or cannot be read as UTF-8.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            rule = f"is larger than {MAX_BYTES // 1024} kB, as no configuration is"
            remedy = "name many files by a folder, a glob or a list"
            raise UserError(Fault(where=str(path), rule=rule, remedy=remedy))
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(Fault(where=str(path), rule=f"cannot be read as UTF-8 text ({error})")) from error


def compose(text: str) -> Node | None:
    """The nodes of a text, with their lines; None of an empty one.

    Raises:
        YAMLError: it is not YAML, or more than plain YAML (`NotPlainError`).
    """
    node: Node | None = _yaml().compose(text)
    return node


def value(node: Node) -> Any:
    """The value of a node.

    Raises:
        YAMLError: it has none, such as a date in the 13th month.
    """
    try:
        return _yaml().constructor.construct_object(node, deep=True)
    except ValueError as error:
        raise YAMLError(str(error)) from error


def read_value(text: str) -> Any:
    """The value of a text, None of an empty one.

    Raises:
        YAMLError: the text is not plain YAML.
    """
    node = compose(text)
    return None if node is None else value(node)


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _PlainComposer
    return yaml
