"""Cache of measurements by content: one JSON file for each block of work, so that a killed run loses one block.

A key names all that the numbers depend on, the versions of the code among it: an update measures anew. A block that is
damaged, or holds a null in the place of a number, is measured again. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import orjson

from zerokara import __version__
from zerokara.durable import write_json

_PACKAGES = ("torch", "transformers", "tokenizers")
Block = TypeVar("Block")


def folder_of(cache: Path | None, *content: Any) -> Path | None:
    """Folder of the blocks of a measurement with this `content` (JSON values); None where nothing is kept."""
    key = json.dumps([*content, __version__, *map(metadata.version, _PACKAGES)])
    return cache and cache / sha256(key.encode()).hexdigest()[:32]


def read(folder: Path | None, index: int, num: int, kind: Callable[..., Block]) -> Block | None:
    """Block `index` as `kind(**fields)`, whose lists have `num` values or none; None if there is no such block."""
    if folder is None:
        return None
    try:
        fields = orjson.loads((folder / f"{index}.json").read_bytes())
        block = kind(**fields)
    except (OSError, ValueError, TypeError, LookupError):
        return None
    lists = [each for each in fields.values() if isinstance(each, list)]
    whole = bool(lists) and len(lists[0]) == num and all(len(each) in (0, num) and None not in each for each in lists)
    return block if whole else None


def write(folder: Path | None, index: int, fields: Mapping[str, Any]) -> None:
    """Keep block `index`."""
    if folder is not None:
        write_json(folder / f"{index}.json", dict(fields))
