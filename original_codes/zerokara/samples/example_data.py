"""The examples of a task as a run reads them: what `data_plan` is for a corpus.

A sample is a packed row of examples (`packed_examples`), and the rows are shuffled anew in each epoch. Tokens are
counted as everywhere in a run, by positions of a sample; so the padding at the ends of rows is counted in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from zerokara.config.data import OrderKind, SampleLengths
from zerokara.samples import packing
from zerokara.samples.data_plan import DataPlan
from zerokara.samples.objective import Batch
from zerokara.samples.order import MixedStage, SampleOrder
from zerokara.samples.packed import DocumentId, TokenSource, document_bounds
from zerokara.samples.packed_examples import PackedExamples, Pairs, pair_lengths
from zerokara.tokens.indexed import EXAMPLES_STEP, IndexedTokens


@dataclass(frozen=True)
class ExampleData:
    """The training examples of a run, how they are packed, and their order."""

    prefix: Path
    """Prefix of the .bin and .idx of the training examples."""
    lengths: SampleLengths
    """Lengths of a packed row."""
    is_encoder_decoder: bool
    pad_id: int
    seed: int
    num_valid_tokens: int = 0
    """Of the validation examples."""
    name: str = "examples"
    """Name of the source, for people."""

    kind: ClassVar[OrderKind] = "shuffle"
    stages: ClassVar[tuple[MixedStage, ...]] = ()

    @cached_property
    def _packed(self) -> PackedExamples:
        return PackedExamples(self.prefix, self.lengths, self.is_encoder_decoder, self.pad_id, self.seed)

    @property
    def samples_per_epoch(self) -> int:
        """Rows in one epoch."""
        return len(self._packed)

    @property
    def samples_per_part(self) -> list[int]:
        """Rows of each source: there is one."""
        return [self.samples_per_epoch]

    @property
    def sources(self) -> tuple[TokenSource, ...]:
        """The one source; its training tokens are the positions of its rows, padding included."""
        return (TokenSource(self.name, 0, self.samples_per_epoch * self.lengths.raw, self.num_valid_tokens),)

    def order(self) -> SampleOrder:
        """The row at each position of the run."""
        return SampleOrder(self.samples_per_epoch, self.seed, self.kind)

    def tokens(self, where: str = "") -> PackedExamples:
        """The rows."""
        return self._packed

    def documents_in(self, sample: int) -> list[DocumentId]:
        """The examples in row number `sample`, in order."""
        return [DocumentId(0, example) for example in self._packed.examples(sample)]

    def validation_batches(self, prefix: Path, objective: Pairs, max_tokens: int | None) -> ExampleBatches:
        """The batches of the examples at `prefix`; `max_tokens` takes the first of them, up to so many tokens.

        Rows are longer than in training where an example is.
        """
        index, lengths = IndexedTokens(prefix, EXAMPLES_STEP), self.lengths
        if index.num_documents:
            taken = pair_lengths(index) if self.is_encoder_decoder else (np.diff(document_bounds(index)) - 1,)
            longest = [packing.rounded_up(int(each.max())) for each in taken]
            lengths = replace(lengths, input=max(lengths.input, longest[0]), target=max(lengths.target, longest[-1]))
        packed = PackedExamples(prefix, lengths, self.is_encoder_decoder, self.pad_id, self.seed, max_tokens)
        return ExampleBatches(packed, objective)

    def identity(self) -> dict[str, Any]:
        """What must stay the same for a run to resume: the packing is a function of it and of the examples."""
        lengths = {"packed_length": self.lengths.input, "packed_target_length": self.lengths.target}
        return {**lengths, "packing": packing.VERSION}


class ExampleBatches:
    """The rows of validation examples, each once; surplus rows of a rank are padding."""

    def __init__(self, packed: PackedExamples, objective: Pairs):
        self.packed, self._objective = packed, objective

    def batches(self, micro_batch_size: int, rank: int = 0, num_ranks: int = 1) -> Iterator[tuple[int, Batch]]:
        """The micro batches that `rank` evaluates, each with part 0; as many on every rank."""
        for start in range(0, len(self.packed), micro_batch_size * num_ranks):
            rows = start + rank * micro_batch_size + np.arange(micro_batch_size)
            yield 0, self._objective(self.packed.many(rows, real=rows < len(self.packed)), rows)


Reading = DataPlan | ExampleData
"""The training samples of a run and their order: of a corpus, or of the examples of a task."""
