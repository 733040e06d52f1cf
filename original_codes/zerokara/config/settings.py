"""Base of the configuration classes: frozen typed fields, a docstring under each, and rules between them.

The docstring of a field (meaning, unit, range) is its help text and its comment in the shipped YAML; that of the class
is the heading there.
"""

import os
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

# Otherwise pydantic reads the metadata of every installed package at each start, in search of plug-ins.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr
from pydantic_core import to_jsonable_python

from zerokara.base.errors import Fault

Auto = Literal["auto"]
_Value = TypeVar("_Value")


def key_of(place: str) -> str:
    """Return the setting to which a place belongs: ``stages`` of ``stages[1].order``."""
    return re.split(r"[.\[]", place)[0]


def resolved(value: _Value | Auto) -> _Value:
    """Return a setting of a planned run, in which no `auto` is left."""
    assert value != "auto", "not resolved"
    return value


def whole(value: Any) -> Any:
    """Turn `1e9`, a float in YAML, into a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_tuple(value: Any) -> Any:
    """Turn YAML's lists into tuples, which are immutable."""
    return tuple(value) if isinstance(value, list) else value


def _listed(value: Any) -> Any:
    """Turn a single entry, written without brackets, into a list."""
    return (value,) if isinstance(value, str) else as_tuple(value)


PositiveInt = Annotated[int, BeforeValidator(whole), Field(gt=0, lt=2**63)]  # JSON has no larger ones
NaturalInt = Annotated[int, BeforeValidator(whole), Field(ge=0, lt=2**63)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NaturalFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Words = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Names = Annotated[Words, Field(min_length=1)]
Prompts = Annotated[Auto | tuple[str, ...], BeforeValidator(lambda value: value if value == "auto" else _listed(value))]
TEXT_PATTERN = r"^[^\x00-\x08\x0a-\x1f\x7f-\x9f]*$"
Text = Annotated[str, Field(min_length=1, pattern=TEXT_PATTERN)]
"""A name or a path, without control characters (but the tab), which would break a log line or steer a terminal."""


@dataclass(frozen=True)
class Origin:
    """The file, its values as they stand there, the line of each, also nested (``stages[1].order``), and `--set` keys.

    Settings are equal by value, whatever their origin.
    """

    path: str = field(default="(defaults)", compare=False)
    lines: dict[str, int] = field(default_factory=dict, compare=False)
    overridden: frozenset[str] = field(default=frozenset(), compare=False)
    values: dict[str, Any] = field(default_factory=dict, compare=False)

    def where(self, key: str, others: Sequence[str] = ()) -> str:
        """``config.yaml:14``, or ``--set`` for a key set on the command line.

        The text also names those of `others` that were set on the command line: ``config.yaml:14, --set lr``.
        """
        if {key, key_of(key)} & self.overridden:
            return "--set"
        while key and key not in self.lines:  # a nested value without a line has its parent's
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        place = f"{self.path}:{self.lines[key]}" if key else self.path
        return ", ".join([place, *(f"--set {other}" for other in dict.fromkeys(others) if other in self.overridden)])


class Entry(BaseModel):
    """A mapping in a list of a configuration, such as a stage or a task."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    unknown: ClassVar[str] = "there is no such setting"
    """Why a name that is not a field is refused."""


class Settings(Entry):
    """Base of the configuration classes."""

    # Only the classes that are loaded are compiled, not their components: compiling takes most of the import time. Nor
    # does pydantic read their docstrings, which would be a fifth of a step's start (`writing`).
    model_config = ConfigDict(defer_build=True)

    first: ClassVar[tuple[str, ...]] = ()
    """Settings that stand at the head of the file and of the help: what people change in their first week."""

    _origin: Origin = PrivateAttr(default_factory=Origin)

    @property
    def path(self) -> Path:
        """The file that the values came from."""
        return Path(self._origin.path)

    def where(self, key: str) -> str:
        """The place where `key` was set: ``config.yaml:14``."""
        return self._origin.where(key)

    def typed(self, key: str) -> bool:
        """True if `key` was set on the command line."""
        return key in self._origin.overridden

    def fault(self, key: str, rule: str, remedy: str = "", reads: Sequence[str] = ()) -> Fault:
        """Return a fault at `key` (``lr``, ``stages[1].order``), with the file, the line and the value found.

        `reads` are the other settings on which `rule` depends; the place names those set on the command line.
        """
        value: Any = self
        for name, index in re.findall(r"(\w+)(?:\[(\d+)\])?", key):
            value = getattr(value, name)
            value = value[int(index)] if index else value
        value = to_jsonable_python(value, exclude_none=True)
        return Fault(self._origin.where(key, reads), rule, key, value, remedy, (key_of(key), *reads))

    def rules(self) -> Iterator[Fault]:
        """Yield faults between valid values, by the rules of this class alone. A rule says which settings it reads: it
        is not applied where one of these is wrong by itself."""
        yield from ()

    def rule_faults(self, wrong_keys: Set[str] = frozenset()) -> Iterator[Fault]:
        """Yield faults by the rules of all components, except those that read one of `wrong_keys`."""
        for component in type(self).__mro__:
            if issubclass(component, Settings) and "rules" in vars(component):
                for fault in component.rules(self):
                    if wrong_keys.isdisjoint(fault.reads):
                        yield fault
