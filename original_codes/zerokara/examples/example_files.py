"""What step 7 has prepared: the files of each split, their counts, and what they were made with.

`ExampleFiles.read` gives it from the manifest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson

from zerokara import manifest
from zerokara.config.finetune_config import DataFormat
from zerokara.durable import PARTIAL_SUFFIX
from zerokara.errors import Fault, UserError
from zerokara.examples.facts import SplitCounts
from zerokara.examples.token_files import ExampleTokens
from zerokara.tokens.layout import bin_path, idx_path

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
STEP = "examples"
"""What the manifest calls it."""
ANSWER_MARGIN = 1.25
"""Most new tokens of an answer, as a multiple of the longest one that is known."""


@dataclass(frozen=True)
class ExamplePaths:
    """Every path that derives from `output_prefix`."""

    output_prefix: str

    def prefix(self, split: Split) -> Path:
        """Prefix of the .bin and .idx of a split."""
        return Path(f"{self.output_prefix}_{split}")

    def texts(self, split: Split) -> Path:
        """The texts of a split's examples, as JSON lines in the order of its token files; of train, conversations."""
        return Path(f"{self.output_prefix}_{split}_examples.jsonl")

    @property
    def quarantine(self) -> Path:
        """The bad lines, as JSON lines; exists only if there are any."""
        return Path(f"{self.output_prefix}_quarantine.jsonl")

    @property
    def written(self) -> list[Path]:
        """Every file that may be written, but for the manifest and the lock."""
        tokens = [path_of(self.prefix(split)) for split in SPLITS for path_of in (bin_path, idx_path)]
        return [*tokens, *map(self.texts, SPLITS), self.quarantine]

    @property
    def manifest(self) -> Path:
        """The manifest, written last."""
        return Path(f"{self.output_prefix}_examples.manifest.json")

    @property
    def lock(self) -> Path:
        """The lock of a process that writes here."""
        return Path(f"{self.output_prefix}_examples.lock{PARTIAL_SUFFIX}")


@dataclass(frozen=True)
class SplitFiles:
    """The files of one split."""

    prefix: Path
    """Of its .bin and .idx."""
    texts_path: Path
    """The texts of its examples."""
    counts: SplitCounts
    sha256: str
    """Of the .bin and the .idx: the tokens, and where reading ends and learning begins."""
    longest_answer: int
    """Tokens, with the end."""

    @property
    def num_examples(self) -> int:
        """Examples in the token files."""
        return self.counts.kept + self.counts.cut


@dataclass(frozen=True)
class ExampleFiles:
    """The prepared examples of a run."""

    splits: Mapping[Split, SplitFiles]
    """Those that are there."""
    data_format: DataFormat
    prompt_template: str
    """With ``{input}`` in it; empty for messages."""
    labels: list[str]
    """The texts of all labels; empty but for text_label."""
    chat_template: str | None
    """The Jinja text; None but for messages."""
    end_ids: list[int]
    """The ids at which generation stops."""

    @property
    def train(self) -> SplitFiles:
        """The training examples, which are always there."""
        return self.splits["train"]

    @property
    def max_new_tokens(self) -> int:
        """Tokens that an answer may have, with room beyond the longest training answer."""
        return math.ceil(ANSWER_MARGIN * self.train.longest_answer)

    @classmethod
    def read(cls, output_prefix: str) -> ExampleFiles:
        """Return what was prepared, from its manifest.

        Raises:
            UserError: nothing was, or its manifest is not complete.
        """
        paths = ExamplePaths(output_prefix)
        done = manifest.read(paths.manifest)
        if done.step != STEP:
            raise UserError(Fault(str(paths.manifest), f"was written by step {done.step!r}, not {STEP!r}"))
        return cls.of(paths, done)

    @classmethod
    def of(cls, paths: ExamplePaths, done: manifest.Manifest) -> ExampleFiles:
        """Return the files that a manifest names."""
        hashes = {Path(record.path).name: record.sha256 for record in done.outputs["examples"]}

        def files(split: Split, counts: dict[str, int], longest_answer: int) -> SplitFiles:
            prefix = paths.prefix(split)
            both = hashes[bin_path(prefix).name] + hashes[idx_path(prefix).name]
            made_of = sha256(both.encode()).hexdigest()
            return SplitFiles(prefix, paths.texts(split), SplitCounts(**counts), made_of, longest_answer)

        facts: dict[str, Any] = dict(done.facts)
        return cls(splits={split: files(split, **values) for split, values in facts.pop("splits").items()}, **facts)


class TaskExample(NamedTuple):
    """One example whose answer is generated."""

    prompt: list[int]
    """The ids after which the (last) answer is asked for; of an encoder-decoder the encoder input."""
    reference: str
    """The right answer."""


def read_task_examples(files: SplitFiles, num_examples: int | None, seed: int) -> list[TaskExample]:
    """Return the first `num_examples` of a random order, all of them, in the order of the files, with None.

    Raises:
        UserError: the files are missing.
    """
    tokens, lines = ExampleTokens(files.prefix), files.texts_path.read_bytes().splitlines()
    assert len(lines) == len(tokens), f"{files.texts_path} has {len(lines)} examples, {files.prefix} {len(tokens)}"
    chosen = range(len(tokens))
    if num_examples is not None and num_examples < len(tokens):
        chosen = np.random.default_rng(seed).permutation(len(tokens))[:num_examples].tolist()
    return [TaskExample(tokens.prompt(number), orjson.loads(lines[number])["reference"]) for number in chosen]
