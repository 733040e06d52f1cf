"""The data of a run and its order: `source_weights`, `stages` and `order`, applied to the token files.

Without weights and stages the training tokens are one stream, and every token is read equally often
(`order.SampleOrder`). Otherwise each source is cut into samples by itself, and these are mixed
(`mixed_order.MixedOrder`). The tokens of a stage are rounded to whole samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zerokara.config.data import DataOrderSettings, DataSettings, OrderKind, SampleLengths, Stage
from zerokara.errors import Fault, UserError
from zerokara.samples.apportionment import whole_weights
from zerokara.samples.documents import DocumentId, SampleDocuments
from zerokara.samples.mixed_order import MixedOrder, MixedStage
from zerokara.samples.order import SampleOrder
from zerokara.samples.packed import PackedTokens
from zerokara.samples.sources import TokenSource, read_sources
from zerokara.tokens.layout import TokenPaths


@dataclass(frozen=True)
class DataPlan:
    """The training tokens of a run, how they are cut into samples, and their declared order."""

    prefix: Path
    """Prefix of the .bin and .idx of the training tokens."""
    sources: tuple[TokenSource, ...]
    lengths: SampleLengths
    seed: int
    kind: OrderKind
    stages: tuple[MixedStage, ...]
    """Empty if the tokens are read as one stream."""

    @classmethod
    def from_config(cls, data: DataSettings, order: DataOrderSettings, lengths: SampleLengths, seed: int) -> DataPlan:
        """Apply a configuration to the token files.

        Raises:
            UserError: there are no token files, or their sources are not those that the weights are for; a source with
                a weight is shorter than one sequence.
        """
        sources = read_sources(data.output_prefix)
        stages: tuple[MixedStage, ...] = ()
        if order.is_mixture:
            faults = list(_source_faults(data, sources))
            if not faults:
                stages = _mixed_stages(order, lengths, sources)
                faults += _length_faults(order, lengths, sources, stages)
            if faults:
                raise UserError(faults)
        return cls(TokenPaths(data.output_prefix).train, sources, lengths, seed, order.order, stages)

    @property
    def parts(self) -> list[int]:
        """Numbers of tokens of the parts that are cut into samples each by itself."""
        counts = [source.num_tokens for source in self.sources]
        return counts if self.stages else [sum(counts)]

    @property
    def samples_per_part(self) -> list[int]:
        """Samples of each part."""
        return [self.lengths.samples_in(part) for part in self.parts]

    @property
    def samples_per_epoch(self) -> int:
        """Samples in one epoch of all sources."""
        return sum(self.samples_per_part)

    def order(self) -> SampleOrder | MixedOrder:
        """The sample at each position of the run."""
        if self.stages:
            return MixedOrder(self.stages, self.samples_per_part, self.seed)
        return SampleOrder(self.samples_per_epoch, self.seed, self.kind)

    def tokens(self, where: str = "") -> PackedTokens:
        """The samples; `where` is the place of `seq_len`, for the fault if there is not a single one."""
        return PackedTokens(self.prefix, self.lengths, where, self.parts)

    def documents_in(self, sample: int) -> list[DocumentId]:
        """The documents in sample number `sample`, in order."""
        return self._documents.in_sample(sample)

    @cached_property
    def _documents(self) -> SampleDocuments:
        return SampleDocuments(self.tokens(), self.sources)

    def identity(self) -> dict[str, Any] | None:
        """The definition of the mixture, None if there is none; a run resumes only with the same one."""
        if not self.stages:
            return None
        tokens = [source.num_tokens for source in self.sources]
        return {"source_tokens": tokens, "stages": [stage.as_json() for stage in self.stages]}


def _source_faults(config: DataSettings, sources: Sequence[TokenSource]) -> Iterator[Fault]:
    """Weights are in the order of `input_jsonl`, so the token files must have been made from the same entries."""
    names = [source.name for source in sources]
    entries = list(config.input_jsonl)
    if len(names) != len(entries) or (names != entries and sorted(names) == sorted(entries)):
        rule = f"is not what the token files were made from: {', '.join(names)}"
        yield config.fault("input_jsonl", rule, "restore it, or tokenize again: step 2 with --redo")


def _mixed_stages(
    config: DataOrderSettings, lengths: SampleLengths, sources: Sequence[TokenSource]
) -> tuple[MixedStage, ...]:
    available = [lengths.samples_in(source.num_tokens) for source in sources]
    stages = []
    for stage in config.stages or (Stage(tokens="rest"),):
        weights = stage.source_weights or config.source_weights
        num = stage.num_tokens
        length: int | None = None
        if stage.source_tokens is not None:
            # With the numbers of samples as weights, the seats of each source are exactly these numbers.
            whole = tuple(_samples_in(tokens, lengths.raw) for tokens in stage.source_tokens)
            length = sum(whole)
        else:
            whole = tuple(available) if isinstance(weights, str) else whole_weights(weights)
            if num is not None:
                length = _samples_in(num, lengths.raw)
        stages.append(MixedStage(whole, length, stage.order or config.order, stage.name or ""))
    return tuple(stages)


def _samples_in(tokens: int, sample_tokens: int) -> int:
    return max(1, round(tokens / sample_tokens)) if tokens else 0


def _length_faults(
    config: DataOrderSettings, lengths: SampleLengths, sources: Sequence[TokenSource], stages: Sequence[MixedStage]
) -> Iterator[Fault]:
    seen = set()
    for index, stage in enumerate(stages):
        own = config.stages[index] if config.stages else Stage()
        given = [name for name in ("source_tokens", "source_weights") if getattr(own, name) is not None]
        key = f"stages[{index}].{given[0]}" if given else "source_weights"
        for source, weight in zip(sources, stage.weights, strict=True):
            if weight and not lengths.samples_in(source.num_tokens) and (key, source) not in seen:
                seen.add((key, source))
                rule = (
                    f"uses {source.name}, which has {source.num_tokens:,} training tokens; one sequence takes "
                    f"{lengths.requirement}"
                )
                yield config.fault(key, rule, "give it weight 0, or more text (step 2)")
        if not sum(stage.weights):
            rule = f"reads sources that are all shorter than a sequence, which takes {lengths.requirement} tokens"
            yield config.fault(key, rule, "give more text (step 2), or lower seq_len")
