"""The examples whose answers are generated and compared: prompts as ids, and the answers that are expected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import orjson

from zerokara.examples.preparation import ExampleFiles
from zerokara.examples.token_files import ExampleTokens

Split = Literal["valid", "test"]


@dataclass(frozen=True)
class TaskExample:
    """One example."""

    prompt: list[int]
    """Ids after which the last answer is asked for: of the encoder's input, where there is one."""
    reference: str
    """The answer that is expected."""


def read_task_examples(files: ExampleFiles, split: Split, num_examples: int | None, seed: int) -> list[TaskExample]:
    """Return the first `num_examples` of a random order (None: all of them in the order of the files)."""
    of_split = files.splits[split]
    tokens = ExampleTokens(of_split.prefix)
    lines = of_split.records_path.read_bytes().splitlines()
    assert len(lines) == len(tokens), f"{of_split.records_path}: {len(lines)} records of {len(tokens)} examples"
    chosen = np.arange(len(tokens))
    if num_examples is not None and num_examples < len(tokens):
        chosen = np.random.default_rng(seed).permutation(len(tokens))[:num_examples]
    return [TaskExample(tokens.prompt(number), orjson.loads(lines[number])["answer"]) for number in chosen.tolist()]
