"""config.json as every client reads it: the names of transformers 5, and beside them those of transformers 4.

transformers 5 moved some values to other names, and writes only these. Whoever reads a file with an older client
(transformers 4, llama.cpp's converter, vLLM) then gets that client's default for what it does not find, often without a
word. So each such value stands under both names; transformers 5 reads its own, and the proof of step 4 reads the file
with it. What the older name of a value is, its family says (`Family.older_names`).

Compared, value by value, against the sources of transformers 4.57.6 and of the converter of llama.cpp (October 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

OLDER_NAMES_OF_ALL = {"dtype": "torch_dtype"}
"""transformers before 4.56 loads in fp32 where it does not find it, and so do those who read the file themselves."""


def with_older_names(values: Mapping[str, Any], older_names: Mapping[str, str]) -> dict[str, Any]:
    """The content of config.json with each value under its older name too, sorted by key.

    Raises:
        KeyError: there is no value to copy: the newer name is no longer what transformers writes.
    """
    copies = {older: _at(values, newer) for newer, older in (OLDER_NAMES_OF_ALL | dict(older_names)).items()}
    return dict(sorted({**values, **copies}.items()))


def _at(values: Mapping[str, Any], dotted: str) -> Any:
    return reduce(lambda found, key: found[key], dotted.split("."), values)
