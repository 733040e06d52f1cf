"""Training data of a run and their order: `source_weights`, `stages` and `order`, applied to the token files.

Without weights and stages the training tokens are one stream, and every token is read equally often
(`order.SampleOrder`). Otherwise each source is cut into samples by itself, and these are mixed
(`order.MixedOrder`). The tokens of a stage are rounded to whole samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerokara.config.data import REPLAY_SHARE, DataOrderSettings, DataSettings, OrderKind, SampleLengths, Stage
from zerokara.errors import Fault, UserError, refuse
from zerokara.samples.order import MixedOrder, MixedStage, SampleOrder, whole_weights
from zerokara.samples.packed_tokens import PackedTokens, Samples, TokenSource, read_sources
from zerokara.tokens.indexed import TokenPaths


@dataclass(frozen=True)
class DataPlan:
    """Training tokens of a run, the lengths of their samples, and their declared order: of a corpus."""

    prefix: Path
    """Prefix of the .bin and .idx of the training tokens."""
    sources: tuple[TokenSource, ...]
    lengths: SampleLengths
    seed: int
    kind: OrderKind
    stages: tuple[MixedStage, ...]
    """Empty if the tokens are read as one stream."""
    held_out: tuple[TokenSource, ...]  # the sources of `valid_jsonl`, which have no training tokens

    @classmethod
    def from_config(cls, data: DataSettings, order: DataOrderSettings, lengths: SampleLengths, seed: int) -> DataPlan:
        """Apply a configuration to the token files.

        Raises UserError if there are no token files, their sources are not those of the weights, or a source with a
        weight is shorter than one sequence.
        """
        found = read_sources(data.output_prefix)
        sources = tuple(source for source in found if source.num_tokens)
        stages: tuple[MixedStage, ...] = ()
        if order.is_mixture:
            # Weights are in the order of `input_jsonl`, so the token files must have been made from the same entries.
            names, entries = [source.name for source in sources], list(data.input_jsonl)
            if len(names) != len(entries) or (names != entries and sorted(names) == sorted(entries)):
                rule = f"is not what the token files were made from: {', '.join(names)}"
                raise UserError(data.fault("input_jsonl", rule, "restore it, or tokenize again: step 2 with --redo"))
            stages = tuple(_mixed_stages(order, lengths, sources))
            refuse(_length_faults(order, lengths, sources, stages))
        prefix, held_out = TokenPaths(data.output_prefix).train, found[len(sources) :]
        return cls(prefix, sources, lengths, seed, order.order, stages, held_out)

    @property
    def _parts(self) -> list[int]:
        """Numbers of tokens of the parts; each is cut into samples by itself."""
        counts = [source.num_tokens for source in self.sources]
        return counts if self.stages else [sum(counts)]

    @property
    def samples_per_part(self) -> list[int]:
        """Samples of each part."""
        return [self.lengths.samples_in(part) for part in self._parts]

    @property
    def samples_per_epoch(self) -> int:
        """Samples in one epoch of all sources."""
        return sum(self.samples_per_part)

    def order(self) -> SampleOrder | MixedOrder:
        """Return the order, which gives the sample at each position of the run."""
        if self.stages:
            return MixedOrder(self.stages, self.samples_per_part, self.seed)
        return SampleOrder(self.samples_per_epoch, self.seed, self.kind)

    def tokens(self, where: str = "") -> Samples:
        """Open the samples; `where` is the place of `seq_len`, for the fault if there is not a single one."""
        return PackedTokens(self.prefix, self.lengths, where, self._parts)

    def documents_in(self, sample: int) -> list[tuple[int, int]]:
        """Return the documents in sample number `sample`, in order, each with the index of its source."""
        return PackedTokens(self.prefix, self.lengths, parts=self._parts).documents(sample, self.sources)

    def identity(self) -> dict[str, Any] | None:
        """Return the definition of the mixture, if any; a run resumes only with the same one."""
        if not self.stages:
            return None
        tokens = [source.num_tokens for source in self.sources]
        stages = [{"weights": [*one.weights], "samples": one.num_samples, "order": one.kind} for one in self.stages]
        return {"source_tokens": tokens, "stages": stages}


def _mixed_stages(
    config: DataOrderSettings, lengths: SampleLengths, sources: Sequence[TokenSource]
) -> Iterator[MixedStage]:
    def samples_in(tokens: int) -> int:
        return max(1, round(tokens / lengths.raw)) if tokens else 0

    for stage in config.stages or (Stage(tokens="rest"),):
        weights, length = stage.source_weights or config.source_weights, None
        if stage.source_tokens is not None:
            # With the numbers of samples as weights, each source gets exactly these numbers.
            whole = tuple(map(samples_in, stage.source_tokens))
            length = sum(whole)
        else:
            if isinstance(weights, str):
                whole = tuple(lengths.samples_in(source.num_tokens) for source in sources)
                if weights == "replay":
                    whole = (round(sum(whole[1:]) * (1 / REPLAY_SHARE - 1)), *whole[1:])
            else:
                whole = whole_weights(weights)
            if stage.num_tokens is not None:
                length = samples_in(stage.num_tokens)
        yield MixedStage(whole, length, stage.order or config.order, stage.name or "")


def _length_faults(
    config: DataOrderSettings, lengths: SampleLengths, sources: Sequence[TokenSource], stages: Sequence[MixedStage]
) -> Iterator[Fault]:
    seen = set()
    for index, stage in enumerate(stages):
        own = config.stages[index] if config.stages else Stage()
        names = [name for name in ("source_tokens", "source_weights") if getattr(own, name) is not None]
        key = f"stages[{index}].{names[0]}" if names else "source_weights"
        for source, weight in zip(sources, stage.weights, strict=True):
            if weight and not lengths.samples_in(source.num_tokens) and (key, source) not in seen:
                seen.add((key, source))
                rule = f"uses {source.name}, which has {source.num_tokens:,} training tokens; one sequence takes "
                yield config.fault(key, rule + lengths.requirement, "give it weight 0, or more text (step 2)")
        if not sum(stage.weights):
            rule = f"reads sources that are all shorter than a sequence, which takes {lengths.requirement} tokens"
            yield config.fault(key, rule, "give more text (step 2), or lower seq_len")
