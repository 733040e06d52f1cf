"""Token files as packed sequences: sample k is ``tokens[k·S : k·S + S + o]``, S tokens and o more of overlap.

The documents of a .bin, each closed by the end-of-document token (EOD), are cut into sequences of S tokens regardless
of where documents end, so there is no padding. In next-token prediction o is 1: position j predicts token j + 1, and
the last token of a sample is the first of the next one. T tokens make (T − o) // S samples.

A run that shuffles cuts the tokens anew in each epoch after the first: they lie in a ring, and the first sample of the
epoch begins at a token that the seed and the epoch determine. So a text that is read ten times is read in ten contexts,
and the tokens behind the last sample are others each time. A run with a sequential stage is cut alike in all epochs.

The tokens of each source (an entry of `input_jsonl`) lie together, in the order of step 2's manifest. Where sources are
mixed by weight, each is cut by itself, so that every sample is of one source; the samples of the second source come
after those of the first. Example, S = 4, o = 1, parts of 10 and 5 tokens: samples 0 and 1 are ``tokens[0:5]`` and
``tokens[4:9]``, sample 2 is ``tokens[10:15]``.

`DataPlan` applies `source_weights`, `stages` and `order`. Without weights and stages the training tokens are one
stream, and every token is read equally often (`order.SampleOrder`). Otherwise each source is cut into samples by
itself, and these are mixed (`order.MixedOrder`). The tokens of a stage are rounded to whole samples.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zerokara.base import manifest
from zerokara.base.errors import Fault, UserError, refuse
from zerokara.config.data import REPLAY_SHARE, OrderKind, SampleLengths, Stage
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.samples.order import CUT_SEEDS, MixedOrder, MixedStage, SampleOrder, derived_seed, mix, whole_weights
from zerokara.tokens.indexed import IndexedTokens, TokenPaths, bin_path


@dataclass(frozen=True)
class TokenSource:
    """The training tokens of one source."""

    name: str
    """Its entry of `input_jsonl`, as it was when step 2 ran."""
    first_token: int
    """Index of its first token in the .bin."""
    num_tokens: int
    num_valid_tokens: int = 0
    """Tokens of its validation documents, which have another .bin, in the same order."""


def read_sources(output_prefix: str) -> tuple[TokenSource, ...]:
    """Read the sources from the manifest of step 2, and check that together they make up the .bin.

    Raises UserError if step 2 has not finished, or its manifest and the .bin disagree.
    """
    paths = TokenPaths(output_prefix)
    num_tokens = len(IndexedTokens(paths.train).tokens)
    sources, expected = list[TokenSource](), 0
    for each in manifest.read(paths.manifest).facts.get("sources", []):
        valid_tokens = each.get("valid", {}).get("tokens", 0)
        sources.append(TokenSource(each["entry"], expected, each["train"]["tokens"], valid_tokens))
        expected += sources[-1].num_tokens
    if num_tokens != expected:
        rule = f"lists {expected:,} training tokens; {bin_path(paths.train)} holds {num_tokens:,}"
        raise UserError(Fault(str(paths.manifest), rule, remedy="tokenize again: step 2 with --redo"))
    return tuple(sources)


def document_bounds(index: IndexedTokens) -> NDArray[np.int64]:
    """Return the beginning of each document in the .bin, and the end of the last, in tokens: [documents + 1]."""
    by_sequence = np.concatenate([[0], np.cumsum(index.lengths, dtype=np.int64)])
    return by_sequence[index.document_indices]


class Samples(Protocol):
    """Training samples by number: `PackedTokens` of a corpus, `PackedExamples` of a task."""

    def __len__(self) -> int: ...

    def many(self, indices: NDArray[np.int64], epochs: NDArray[np.int64]) -> Any:
        """Return the samples at `indices`, each as its epoch has it, as their objective takes them."""

    def documents(self, index: int, epoch: int, sources: Sequence[TokenSource]) -> list[tuple[int, int]]:
        """Return the documents in a sample, each by the index of its source and its own in the source."""


class PackedTokens:
    """The samples of one .bin and .idx, memory-mapped.

    `parts` are the numbers of tokens of the parts that are cut each by itself, None is a single part. `seed` is that of
    the cuts; None cuts all epochs alike.

    Raises UserError if the files are missing or damaged.
    """

    def __init__(
        self,
        prefix: Path | str,
        lengths: SampleLengths,
        parts: Sequence[int] | None = None,
        seed: int | None = None,
    ):
        self.lengths, self._index, self._seed = lengths, IndexedTokens(prefix), seed
        self.num_tokens = len(self._index.tokens)
        self._parts = parts = [self.num_tokens] if parts is None else parts
        assert sum(parts) == self.num_tokens, f"parts of {sum(parts)} tokens of {self.num_tokens}"
        self._first_samples = [0, *accumulate(map(lengths.samples_in, parts))]
        self._first_tokens = [0, *accumulate(parts)]

    def __len__(self) -> int:
        return self._first_samples[-1]

    def sample(self, index: int, epoch: int = 0) -> NDArray[np.int64]:
        """Return sample `index` of an epoch: int64 [S + o]."""
        tokens = self._index.tokens
        return np.concatenate([tokens[start:end] for start, end in self._ranges(index, epoch)]).astype(np.int64)

    def _ranges(self, index: int, epoch: int) -> list[tuple[int, int]]:
        """Return where the tokens of a sample lie in the .bin: two ranges if it goes over the end of its part."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        part = bisect_right(self._first_samples, index) - 1
        first, size = self._first_tokens[part], self._parts[part]
        start = (index - self._first_samples[part]) * self.lengths.raw
        if epoch and self._seed is not None:
            start = (start + mix(derived_seed(self._seed, CUT_SEEDS, part) + epoch)) % size
        end = start + self.lengths.raw + self.lengths.overlap
        if end <= size:
            return [(first + start, first + end)]
        return [(first + start, first + size), (first, first + end - size)]

    def many(self, indices: NDArray[np.int64], epochs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at `indices`, each as its epoch has it: int64 [len(indices), S + o]."""
        return np.stack([self.sample(*each) for each in zip(indices.tolist(), epochs.tolist(), strict=True)])

    def documents(self, index: int, epoch: int, sources: Sequence[TokenSource]) -> list[tuple[int, int]]:
        """Return the documents of which a sample holds a token (an EOD is one), by binary search in the .idx.

        Each is the index of its source, and its own among the source's training documents.
        """
        firsts, documents = [self._document_at(source.first_token) for source in sources], []
        for start, end in self._ranges(index, epoch):
            for document in range(self._document_at(start), self._document_at(end - 1) + 1):
                source = bisect_right(firsts, document) - 1
                documents.append((source, document - firsts[source]))
        return documents

    def _document_at(self, token: int) -> int:
        """Return the document that holds a token of the .bin, counted over all sources."""
        if token >= self.num_tokens:  # where an empty last source would begin
            return self._index.num_documents
        # `bisect` and not numpy's search: the numbers lie unaligned in the .idx, and numpy would copy them all first.
        sequence = bisect_right(self._index.pointers, token * self._index.dtype.itemsize) - 1
        return bisect_right(self._index.document_indices, sequence) - 1


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
    def from_config(cls, config: PretrainConfig) -> DataPlan:
        """Apply a configuration to the token files.

        Raises UserError if there are no token files, their sources are not those of the weights, a source with a weight
        is shorter than one sequence, or all of them are.
        """
        found = read_sources(config.output_prefix)
        sources = tuple(source for source in found if source.num_tokens)
        stages: tuple[MixedStage, ...] = ()
        if config.is_mixture:
            # Weights are in the order of `input_jsonl`, so the token files must have been made from the same entries.
            names, entries = [source.name for source in sources], list(config.input_jsonl)
            if len(names) != len(entries) or (names != entries and sorted(names) == sorted(entries)):
                rule = f"is not what the token files were made from: {', '.join(names)}"
                raise UserError(config.fault("input_jsonl", rule, "restore it, or tokenize again: step 2 with --redo"))
            stages = tuple(_mixed_stages(config, sources))
            refuse(_length_faults(config, sources, stages))
        prefix, held_out = TokenPaths(config.output_prefix).train, found[len(sources) :]
        plan = cls(prefix, sources, config.lengths, config.seed, config.order, stages, held_out)
        if not plan.samples_per_epoch:
            lengths, num_tokens = plan.lengths, sum(plan._parts)
            rule = f"{bin_path(prefix)} holds {num_tokens:,} tokens, and one sequence takes {lengths.requirement}"
            remedy = "give more text (step 2)"
            if num_tokens > lengths.overlap:
                longest = lengths.input * (num_tokens - lengths.overlap) // lengths.raw
                remedy += f", or set seq_len to at most {longest:,}"
            raise UserError(config.fault("seq_len", rule, remedy))
        return plan

    @property
    def _parts(self) -> list[int]:
        """Numbers of tokens of the parts; each is cut into samples by itself."""
        counts = [source.num_tokens for source in self.sources]
        return counts if self.stages else [sum(counts)]

    @property
    def samples_per_part(self) -> list[int]:
        return [self.lengths.samples_in(part) for part in self._parts]

    @property
    def samples_per_epoch(self) -> int:
        return sum(self.samples_per_part)

    def tokens_of(self, epochs: float) -> int:
        """Return how many tokens a run can read until the first source has been read for this many epochs."""
        left = [epochs * each for each in self.samples_per_part]
        if not self.stages:
            return int(left[0]) * self.lengths.raw
        samples = 0.0
        for stage in self.stages:
            shares = [weight / sum(stage.weights) for weight in stage.weights]
            end = min(there / share for there, share in zip(left, shares, strict=True) if share)
            length = min(end, math.inf if stage.num_samples is None else stage.num_samples)
            samples += length
            left = [there - length * share for there, share in zip(left, shares, strict=True)]
            if stage.num_samples is None or end < stage.num_samples - 1e-6:
                break
        return int(samples + 1e-6) * self.lengths.raw  # rounding may leave it just below a whole number

    def order(self) -> SampleOrder | MixedOrder:
        """Return the order, which gives the sample at each position of the run."""
        if self.stages:
            return MixedOrder(self.stages, self.samples_per_part, self.seed)
        return SampleOrder(self.samples_per_epoch, self.seed, self.kind)

    def tokens(self) -> Samples:
        in_sequence = "sequential" in ({stage.kind for stage in self.stages} or {self.kind})
        return PackedTokens(self.prefix, self.lengths, self._parts, None if in_sequence else self.seed)

    def identity(self) -> dict[str, Any] | None:
        """Return the definition of the mixture, if any; a run resumes only with the same one."""
        if not self.stages:
            return None
        tokens = [source.num_tokens for source in self.sources]
        stages = [{"weights": [*one.weights], "samples": one.num_samples, "order": one.kind} for one in self.stages]
        return {"source_tokens": tokens, "stages": stages}


def _mixed_stages(config: PretrainConfig, sources: Sequence[TokenSource]) -> Iterator[MixedStage]:
    lengths = config.lengths

    def samples_in(tokens: int) -> int:
        return max(1, round(tokens / lengths.raw)) if tokens else 0

    for stage in config.stages or (Stage(tokens="rest"),):
        weights = stage.source_weights or config.source_weights
        length = None if stage.num_tokens is None else samples_in(stage.num_tokens)
        if stage.source_tokens is not None:
            # With the numbers of samples as weights, each source gets exactly these numbers.
            whole = tuple(map(samples_in, stage.source_tokens))
            length = sum(whole)
        elif isinstance(weights, str):
            whole = tuple(lengths.samples_in(source.num_tokens) for source in sources)
            if weights == "replay":
                whole = (round(sum(whole[1:]) * (1 / REPLAY_SHARE - 1)), *whole[1:])
        else:
            whole = whole_weights(weights)
        yield MixedStage(whole, length, stage.order or config.order, stage.name or "")


def _length_faults(
    config: PretrainConfig, sources: Sequence[TokenSource], stages: Sequence[MixedStage]
) -> Iterator[Fault]:
    lengths, seen = config.lengths, set()
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
