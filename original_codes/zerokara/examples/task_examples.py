"""The validation or test examples of a task, as a metric needs them: the prompt in ids, the answer as text."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import orjson

from zerokara.examples.example_files import ExampleFiles
from zerokara.examples.layout import Split
from zerokara.examples.token_files import ExampleTokens

__all__ = ["Split", "TaskExample", "read_task_examples"]


class TaskExample(NamedTuple):
    """One example whose answer is generated."""

    prompt: list[int]
    """The ids after which the (last) answer is asked for; of an encoder-decoder the encoder input."""
    reference: str
    """The right answer."""


def read_task_examples(files: ExampleFiles, split: Split, num_examples: int | None, seed: int) -> list[TaskExample]:
    """Return the first `num_examples` of a random order, all of them, in the order of the files, with None.

    Raises:
        UserError: the files are missing.
    """
    found = files.split(split)
    tokens = ExampleTokens(found.prefix)
    lines = found.records_path.read_bytes().splitlines()
    assert len(lines) == len(tokens), f"{found.records_path} has {len(lines)} examples, {found.prefix} {len(tokens)}"
    chosen = range(len(tokens))
    if num_examples is not None and num_examples < len(tokens):
        chosen = np.random.default_rng(seed).permutation(len(tokens))[:num_examples].tolist()
    return [TaskExample(tokens.prompt(number), orjson.loads(lines[number])["reference"]) for number in chosen]
