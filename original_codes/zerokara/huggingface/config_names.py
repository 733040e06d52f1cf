"""config.json as every client reads it: with the key names of transformers 5 and of transformers 4.

transformers 5 renamed some keys and writes only the new names. An older client (transformers 4, llama.cpp's converter,
vLLM) that does not find its key takes its own default, often without a warning. So each such value is written under
both names; transformers 5 reads its own, and the proof of step 4 reads the file with it. A family lists its older names
in `Family.older_names`.

Compared, value by value, with the sources of transformers 4.57.6 and of llama.cpp's converter (October 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

from zerokara.model.shapes import ModelShape

OLDER_NAMES_OF_ALL = {"dtype": "torch_dtype"}
"""Without it transformers before 4.56, and programs that read the file themselves, load in fp32."""


def setting_values(settings: Mapping[str, str], shape: ModelShape) -> dict[str, Any]:
    """The values of config.json that are settings of ours; `settings`: its keys, dotted where nested → ours."""
    values: dict[str, Any] = {}
    for dotted, setting in settings.items():
        *outer, key = dotted.split(".")
        reduce(lambda inner, name: inner.setdefault(name, {}), outer, values)[key] = getattr(shape, setting)
    return values


def with_older_names(values: Mapping[str, Any], older_names: Mapping[str, str]) -> dict[str, Any]:
    """The content of config.json with each value under its older name as well, sorted by key.

    Raises:
        KeyError: there is no value to copy: transformers no longer writes the newer name.
    """
    copies = {older: _at(values, newer) for newer, older in (OLDER_NAMES_OF_ALL | dict(older_names)).items()}
    return dict(sorted({**values, **copies}.items()))


def _at(values: Mapping[str, Any], dotted: str) -> Any:
    return reduce(lambda value, key: value[key], dotted.split("."), values)
