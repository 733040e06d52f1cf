"""Files of prepared examples: token files, texts, and a manifest with counts and inputs.

Token files are in Megatron's own format (`tokens.indexed`), in which an example is a document and its segments are
sequences, read and learned in turn; the first is read, and may be empty. So the index says exactly where the learned
tokens are, and nothing is searched for. Example: the examples [5, 6] read, [7, 2] learned; and [8] read, [9, 2]
learned, [5] read, [2] learned, have the sequence lengths 2 2 1 2 1 1 and the document indices 0 2 6.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from zerokara.base import manifest
from zerokara.base.durable import PARTIAL_SUFFIX, atomic_file
from zerokara.config.finetune_config import DataFormat
from zerokara.examples.facts import SplitCounts
from zerokara.tokenizer.encoder import Ids
from zerokara.tokens.indexed import EXAMPLES_STEP, IndexedTokens, bin_path, idx_path, write_index

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
STEP = "examples"
ANSWER_MARGIN = 1.25
"""Maximum new tokens of an answer, as a multiple of the longest one that is known."""


class ExamplePaths:
    """Every path that derives from `output_prefix`."""

    def __init__(self, output_prefix: str):
        self.output_prefix = output_prefix
        self.manifest = Path(f"{output_prefix}_examples.manifest.json")  # written last
        self.quarantine = Path(f"{output_prefix}_examples_quarantine.jsonl")  # exists only if there are bad lines
        self.lock = Path(f"{output_prefix}_examples.lock{PARTIAL_SUFFIX}")  # stays where a preparation was killed

    def prefix(self, split: Split) -> Path:
        """Prefix of the .bin and .idx of a split."""
        return Path(f"{self.output_prefix}_{split}")

    def texts(self, split: Split) -> Path:
        """Texts of a split's examples, as JSON lines in the order of its token files; for train, conversations."""
        return Path(f"{self.output_prefix}_{split}_examples.jsonl")

    @property
    def written(self) -> list[Path]:
        """Every file that may be written, but for the manifest."""
        tokens = [path_of(self.prefix(split)) for split in SPLITS for path_of in (bin_path, idx_path)]
        return [*tokens, *map(self.texts, SPLITS), self.quarantine]


@dataclass(frozen=True)
class SplitFiles:
    prefix: Path
    """Prefix of its .bin and .idx."""
    texts_path: Path
    counts: SplitCounts
    sha256: str
    """Hash of the .bin and the .idx: the tokens, and which of them are learned."""

    @property
    def num_examples(self) -> int:
        return self.counts.kept + self.counts.cut


@dataclass(frozen=True)
class ExampleFiles:
    """Prepared examples of a run."""

    splits: Mapping[Split, SplitFiles]
    """Train, and valid and test where there are any."""
    data_format: DataFormat
    prompt_template: str
    """With ``{input}`` in it; empty for messages."""
    labels: list[str]
    """Texts of all labels; empty but for text_label."""
    chat_template: str | None
    """Jinja text; None but for messages."""
    end_ids: list[int]
    """Ids at which generation stops."""

    @property
    def train(self) -> SplitFiles:
        return self.splits["train"]

    @property
    def max_new_tokens(self) -> int:
        """Maximum tokens of an answer, with room beyond the longest training answer."""
        return math.ceil(ANSWER_MARGIN * self.train.counts.longest_answer)

    @classmethod
    def read(cls, output_prefix: str) -> ExampleFiles:
        """Read the manifest of a preparation; raise UserError if there is none, or it is not complete."""
        paths = ExamplePaths(output_prefix)
        done = manifest.read(paths.manifest)
        hashes = {Path(record.path).name: record.sha256 for record in done.outputs["examples"]}
        facts, splits = dict(done.facts), dict[Split, SplitFiles]()
        for split, counts in facts.pop("splits").items():
            prefix = paths.prefix(split)
            both = hashes[bin_path(prefix).name] + hashes[idx_path(prefix).name]
            content = sha256(both.encode()).hexdigest()
            splits[split] = SplitFiles(prefix, paths.texts(split), SplitCounts(**counts), content)
        return cls(splits, **facts)


@contextmanager
def example_writer(prefix: Path, dtype: np.dtype[Any]) -> Iterator[Callable[[Sequence[Ids]], None]]:
    """Yield a function that appends an example to a pair of token files, which appear unless the block raises."""
    lengths, ends = array("i"), array("q", [0])
    with atomic_file(bin_path(prefix)) as file:

        def write(segments: Sequence[Ids]) -> None:
            lengths.extend(map(len, segments))
            ends.append(len(lengths))
            file.write(np.concatenate(segments).astype(dtype).data)

        yield write
    with atomic_file(idx_path(prefix)) as file:
        write_index(file, np.array(lengths, dtype=np.int32), dtype, np.array(ends, dtype=np.int64))


def prompt_of(segments: Sequence[NDArray[Any]]) -> list[int]:
    """Return the ids after which the last answer is asked for: all before the last learned segment of an example."""
    last = len(segments) - 1 - len(segments) % 2
    return [int(token) for segment in segments[:last] for token in segment]


def read_task_examples(files: SplitFiles, num_examples: int | None, seed: int) -> list[tuple[list[int], str]]:
    """Return the prompt in ids (all before the last answer) and the right answer of a split's `chosen` examples."""
    tokens, lines = IndexedTokens(files.prefix, EXAMPLES_STEP), files.texts_path.read_bytes().splitlines()
    total = tokens.num_documents
    assert len(lines) == total, f"{files.texts_path} has {len(lines)} examples, {files.prefix} {total}"
    numbers = chosen(total, num_examples, seed)
    return [(prompt_of(tokens.sequences(number)), orjson.loads(lines[number])["reference"]) for number in numbers]


def chosen(total: int, num_examples: int | None, seed: int) -> Sequence[int]:
    """Return the numbers of the examples that a model answers: all of them with None, in the order of the files; else
    the first `num_examples` of a random order."""
    if num_examples is None or num_examples >= total:
        return range(total)
    return np.random.default_rng(seed).permutation(total)[:num_examples].tolist()
