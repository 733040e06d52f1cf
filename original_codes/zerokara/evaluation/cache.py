"""Cache of measurements by content: one JSON file for each block of work, so that a killed run loses one block.

A key names all that the numbers depend on, the versions of the code among it: an update measures anew. A block that is
damaged is measured again. No torch here.
"""

import json
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson

from zerokara import __version__
from zerokara.base.durable import write_json

_PACKAGES = ("torch", "transformers", "tokenizers")


def folder_of(cache: Path | None, *content: Any) -> Path | None:
    """Folder of the blocks of a measurement with this `content` (JSON values); None where nothing is kept."""
    key = json.dumps([*content, __version__, *map(metadata.version, _PACKAGES)])
    return cache and cache / sha256(key.encode()).hexdigest()[:32]


def read(folder: Path | None, index: int) -> Any:
    """Content of block `index`; None if there is no such block."""
    try:
        return orjson.loads((folder / f"{index}.json").read_bytes()) if folder else None
    except (OSError, ValueError):
        return None


def write(folder: Path | None, index: int, content: Any) -> None:
    if folder:
        write_json(folder / f"{index}.json", content)
