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
    input: str
    """What is read, as text, without its template."""
    label: str | None
    """The label in the data file, where there is one; `reference` is the text for it."""
    seen: bool
    """Whether a training example has the same input; of a test example, a training or validation example."""
    place: str
    """``file:line``"""


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
    return [_example(tokens.prompt(number), lines[number]) for number in chosen]


def _example(prompt: list[int], line: bytes) -> TaskExample:
    values = orjson.loads(line)
    return TaskExample(prompt, values["reference"], values["input"], values["label"], values["seen"], values["place"])
