"""Base of the configuration classes: frozen typed fields, a docstring under each, and rules between them.

The docstring under a field states its meaning, unit and range; it is both the help text and the comment in the shipped
YAML, where the docstring of the class is the heading. A rule names the keys that it reads, so that it runs only if
those are valid by themselves.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

# Otherwise pydantic reads the metadata of every installed package at each start, in search of plug-ins.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from zerokara.errors import Fault

Auto = Literal["auto"]
_Value = TypeVar("_Value")


def resolved(value: _Value | Auto) -> _Value:
    """The value of a setting whose `auto` the plan of the run has replaced."""
    assert value != "auto", "not resolved"
    return value


def _whole(value: Any) -> Any:
    """Turn `1e9`, a float in YAML, into a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_tuple(value: Any) -> Any:
    """Turn YAML's lists into tuples, which are immutable."""
    return tuple(value) if isinstance(value, list) else value


def _listed(value: Any) -> Any:
    """Turn a single entry, written without brackets, into a list."""
    return (value,) if isinstance(value, str) else as_tuple(value)


PositiveWhole = Annotated[int, BeforeValidator(_whole), Field(gt=0)]
NaturalWhole = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NaturalNumber = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Words = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x08\x0a-\x1f\x7f-\x9f]*$")]
"""A name or a path, without control characters (but the tab), which would break a log line or steer a terminal."""


@dataclass(frozen=True)
class Origin:
    """The file that the values came from, and the line of each key (or the option that set it), also nested."""

    path: str = "(defaults)"
    lines: dict[str, int] = field(default_factory=dict)
    overridden: frozenset[str] = frozenset()

    def where(self, key: str, others: Iterable[str] = ()) -> str:
        """``config.yaml:14``, or ``--set`` for a key set on the command line.

        A nested value is named as in Python, ``stages[1].order``; if it has no line, its parent's is given. Of the
        `others`, whose values matter as well, those set on the command line are named: ``config.yaml:14, --set lr``.
        """
        if {key, re.split(r"[.\[]", key)[0]} & self.overridden:
            return "--set"
        return ", ".join([self._line(key), *(f"--set {other}" for other in others if other in self.overridden)])

    def _line(self, key: str) -> str:
        while key:
            if key in self.lines:
                return f"{self.path}:{self.lines[key]}"
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        return self.path


SettingsRule = Callable[[Any], Iterator[Fault]]
_RuleType = TypeVar("_RuleType", bound=SettingsRule)


def rule(*keys: str) -> Callable[[_RuleType], _RuleType]:
    """Mark a method that yields the faults between `keys`; it runs only if each of these is valid by itself."""

    def mark(method: _RuleType) -> _RuleType:
        method.rule_keys = keys  # type: ignore[attr-defined]
        return method

    return mark


class Settings(BaseModel):
    """Base of the configuration classes."""

    # Only the classes that are loaded are compiled, not those that they consist of: it takes most of their import.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, defer_build=True)

    _origin: Origin = PrivateAttr(default_factory=Origin)

    def __eq__(self, other: object) -> bool:
        """Equal by value, whatever file the values came from."""
        return type(other) is type(self) and isinstance(other, Settings) and self.model_dump() == other.model_dump()

    @property
    def path(self) -> Path:
        """The file that the values came from."""
        return Path(self._origin.path)

    def where(self, key: str) -> str:
        """The place where `key` was set: ``config.yaml:14``."""
        return self._origin.where(key)

    def fault(self, key: str, rule: str, remedy: str = "", others: Sequence[str] = ()) -> Fault:
        """A fault at `key` (``lr``, ``stages[1].order``), with the file, the line and the value found.

        The settings that `rule` names, and the `others`, matter as well: those of them that the command line has set
        are named in the place.
        """
        shown: Any = self
        for name, index in re.findall(r"(\w+)(?:\[(\d+)\])?", key):
            shown = getattr(shown, name)
            shown = shown[int(index)] if index else shown
        if isinstance(shown, BaseModel):
            shown = shown.model_dump(exclude_none=True)
        shown = list(shown) if isinstance(shown, tuple) else shown
        where = self._origin.where(key, dict.fromkeys([*others, *re.findall(r"\w+", rule)]))
        return Fault(where=where, key=key, value=shown, rule=rule, remedy=remedy)

    def rule_faults(self, wrong_keys: Set[str] = frozenset()) -> Iterator[Fault]:
        """The faults of every rule that reads none of `wrong_keys`."""
        for parent in type(self).__mro__:
            for method in list(vars(parent).values()):
                keys = getattr(method, "rule_keys", ())
                if keys and wrong_keys.isdisjoint(keys):
                    yield from method(self)
