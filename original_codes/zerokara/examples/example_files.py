"""What step 7 has prepared: the files of each split, their counts, and what they were made with.

`ExampleFiles.read` gives it from the manifest, whose facts `manifest_facts` makes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from zerokara import manifest
from zerokara.config.finetune_config import DataFormat
from zerokara.errors import Fault, UserError
from zerokara.examples.chat_template import ChatTemplate
from zerokara.examples.facts import SplitCounts
from zerokara.examples.formats import ExampleFormat
from zerokara.examples.layout import ExamplePaths, Split
from zerokara.examples.splits import SplitTally
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.layout import bin_path, idx_path

STEP = "examples"
"""What the manifest calls it."""
ANSWER_MARGIN = 1.25
"""Most new tokens of an answer, as a multiple of the longest one that is known."""


@dataclass(frozen=True)
class SplitFiles:
    """The files of one split."""

    prefix: Path
    """Of its .bin and .idx."""
    records_path: Path
    """The texts of its examples; not of train."""
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

    train: SplitFiles
    valid: SplitFiles | None
    test: SplitFiles | None
    data_format: DataFormat
    prompt_template: str
    """With ``{input}`` in it; empty for messages."""
    labels: list[str]
    """The texts of all labels; empty but for text_label."""
    chat_template: str | None
    """The Jinja text; None but for messages."""

    @property
    def splits(self) -> list[SplitFiles]:
        """Those that are there."""
        return [split for split in (self.train, self.valid, self.test) if split is not None]

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest training answer, with its end."""
        return self.train.longest_answer

    @property
    def max_new_tokens(self) -> int:
        """Tokens that an answer may have, with room beyond the longest one."""
        return math.ceil(ANSWER_MARGIN * self.longest_answer)

    def split(self, split: Split) -> SplitFiles:
        """The files of a split that is there."""
        found: SplitFiles | None = getattr(self, split)
        assert found is not None, f"there are no {split} examples"
        return found

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
        train, facts = _split_files("train", paths, done), done.facts
        assert train is not None, f"{paths.manifest} names no training examples"
        return cls(
            train,
            _split_files("valid", paths, done),
            _split_files("test", paths, done),
            facts["data_format"],
            facts["prompt_template"],
            facts["labels"],
            facts["chat_template"],
        )


def _split_files(split: Split, paths: ExamplePaths, done: manifest.Manifest) -> SplitFiles | None:
    if split not in done.facts["splits"]:
        return None
    values, prefix = done.facts["splits"][split], paths.prefix(split)
    hashes = {Path(record.path).name: record.sha256 for record in done.outputs["examples"]}
    return SplitFiles(
        prefix,
        paths.records(split),
        SplitCounts(**values["counts"]),
        sha256((hashes[bin_path(prefix).name] + hashes[idx_path(prefix).name]).encode()).hexdigest(),
        values["longest_answer"],
    )


def manifest_facts(
    form: ExampleFormat, template: ChatTemplate | None, encoder: Encoder, tallies: Mapping[Split, SplitTally]
) -> dict[str, Any]:
    """What the manifest records beside settings, inputs and outputs."""
    return {
        "data_format": form.name,
        "input_field": form.input_field,
        "output_field": form.output_field,
        "prompt_template": form.prompt_template,
        "label_words": form.label_words,
        "labels": sorted({*form.label_words.values()} or set().union(*(tally.labels for tally in tallies.values()))),
        "chat_template": template.source if template else None,
        "tokenizer_sha256": encoder.sha256,
        "splits": {
            split: {
                "counts": asdict(tally.counts),
                "longest_answer": tally.longest_answer,
                "unknown_answers": tally.unknown_answers,
                "seen": tally.seen,
            }
            for split, tally in tallies.items()
        },
    }
