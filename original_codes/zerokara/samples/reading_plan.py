"""What a run reads, and in which order: `source_weights`, `stages` and `order` applied to the sources that are there.

Without weights and without stages the training tokens are one stream, and every token is read equally often
(`order.SampleOrder`). Otherwise each source is cut into samples by itself, and these are mixed
(`mixed_order.MixedOrder`). Tokens that a stage asks for are rounded to whole samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerokara.config.curriculum import Stage
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.sample_lengths import SampleLengths
from zerokara.errors import Fault, UserError
from zerokara.samples.apportionment import whole_weights
from zerokara.samples.mixed_order import MixedOrder, MixedStage
from zerokara.samples.order import Kind, SampleOrder
from zerokara.samples.packed import PackedTokens
from zerokara.samples.sources import Source, read_sources
from zerokara.tokens.layout import TokenPaths


@dataclass(frozen=True)
class ReadingPlan:
    """The declared reading of a run."""

    prefix: Path
    """Of the training tokens."""
    sources: tuple[Source, ...]
    lengths: SampleLengths
    seed: int
    kind: Kind
    stages: tuple[MixedStage, ...]
    """Empty where the tokens are read as one stream."""

    @classmethod
    def from_config(cls, config: PretrainConfig) -> ReadingPlan:
        """Apply a configuration to the token files.

        Raises:
            UserError: there are no token files, or they do not have the sources that the weights speak of; a source
                that is to be read is shorter than one sequence.
        """
        sources = read_sources(config.output_prefix)
        stages: tuple[MixedStage, ...] = ()
        if config.stages or config.source_weights != "proportional":
            faults = list(_source_faults(config, sources))
            if not faults:
                stages = _mixed_stages(config, sources)
                faults += _length_faults(config, sources, stages)
            if faults:
                raise UserError(faults)
        prefix = TokenPaths(config.output_prefix).train
        return cls(prefix, sources, config.lengths, config.seed, config.order, stages)

    @property
    def parts(self) -> list[int]:
        """Tokens of the pieces that are cut into samples each by itself."""
        each = [source.num_tokens for source in self.sources]
        return each if self.stages else [sum(each)]

    @property
    def samples_per_part(self) -> list[int]:
        """Samples of each part."""
        return [self.lengths.samples_in(part) for part in self.parts]

    @property
    def samples_per_epoch(self) -> int:
        """Samples in one pass over everything."""
        return sum(self.samples_per_part)

    def order(self) -> SampleOrder | MixedOrder:
        """Which sample stands at which position of the run."""
        if self.stages:
            return MixedOrder(self.stages, self.samples_per_part, self.seed)
        return SampleOrder(self.samples_per_epoch, self.seed, self.kind)

    def tokens(self, where: str = "") -> PackedTokens:
        """The samples; `where` is the place of `seq_len`, for the message when there is not one."""
        return PackedTokens(self.prefix, self.lengths, where, self.parts)

    def identity(self) -> dict[str, Any] | None:
        """What a mixture is made of; None where there is none. A run that has begun goes on with the same one only."""
        if not self.stages:
            return None
        tokens = [source.num_tokens for source in self.sources]
        return {"source_tokens": tokens, "stages": [stage.as_json() for stage in self.stages]}


def _source_faults(config: PretrainConfig, sources: Sequence[Source]) -> Iterator[Fault]:
    """Weights stand in the order of `input_jsonl`: the token files must have been made from the same entries."""
    names = [source.name for source in sources]
    entries = list(config.input_jsonl)
    if len(names) != len(entries) or (names != entries and sorted(names) == sorted(entries)):
        rule = f"is not what the token files were made from: {', '.join(names)}"
        yield config.fault("input_jsonl", rule, "write it as it was, or tokenise again: step 2 with --redo")


def _mixed_stages(config: PretrainConfig, sources: Sequence[Source]) -> tuple[MixedStage, ...]:
    there = [config.lengths.samples_in(source.num_tokens) for source in sources]
    stages = []
    for stage in config.stages or (Stage(tokens="rest"),):
        weights = stage.source_weights or config.source_weights
        num = stage.num_tokens
        length: int | None = None
        if stage.source_tokens is not None:
            # So many samples of each are exactly the seats that weights of so many give.
            whole = tuple(_samples_in(tokens, config.lengths.raw) for tokens in stage.source_tokens)
            length = sum(whole)
        else:
            whole = tuple(there) if isinstance(weights, str) else whole_weights(weights)
            if num is not None:
                length = _samples_in(num, config.lengths.raw)
        stages.append(MixedStage(whole, length, stage.order or config.order, stage.name or ""))
    return tuple(stages)


def _samples_in(tokens: int, taken: int) -> int:
    return max(1, round(tokens / taken)) if tokens else 0


def _key(config: PretrainConfig, index: int, key: str) -> str:
    """Where stage `index` got a setting from: its own, or the top level's."""
    own = config.stages and getattr(config.stages[index], key) is not None
    return f"stages[{index}].{key}" if own else key


def _length_faults(config: PretrainConfig, sources: Sequence[Source], stages: Sequence[MixedStage]) -> Iterator[Fault]:
    seen = set()
    for index, stage in enumerate(stages):
        exact = config.stages and config.stages[index].source_tokens is not None
        key = f"stages[{index}].source_tokens" if exact else _key(config, index, "source_weights")
        for source, weight in zip(sources, stage.weights, strict=True):
            if weight and not config.lengths.samples_in(source.num_tokens) and (key, source) not in seen:
                seen.add((key, source))
                rule = (
                    f"asks for {source.name}, which has {source.num_tokens:,} training tokens; one sequence takes "
                    f"{config.lengths.requirement}"
                )
                yield config.fault(key, rule, "give it 0, or more text (step 2)")
        if not sum(stage.weights):
            yield config.fault("seq_len", "is longer than every source; not one sequence can be made")
