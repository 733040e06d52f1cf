"""Token files of several sources, every token of which occurs once, so that a token tells its document."""

import random
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from made_tokens import write_documents

from zerokara.base import manifest
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.samples.order import MixedOrder, SampleOrder
from zerokara.samples.packed_tokens import DataPlan
from zerokara.tokens.indexed import TokenPaths
from zerokara.training.planning.schedule import Consumption, Schedule, consumption, extent_of


def write_sources(folder: Path, lengths: Sequence[Sequence[int]]) -> dict[int, tuple[int, int]]:
    """Write a document of each length for each source; gives token → (source, document in the source)."""
    documents, owner = [], {}
    for source, of_source in enumerate(lengths):
        for number, length in enumerate(of_source):
            first = len(owner)
            documents.append(np.arange(first, first + length))
            owner.update(dict.fromkeys(range(first, first + length), (source, number)))
    paths = TokenPaths(str(folder / "tokens"))
    write_documents(paths.train, documents, np.dtype(np.int32))
    sources = [
        {"entry": f"{name}.jsonl", "train": {"tokens": sum(of_source), "documents": len(of_source)}}
        for name, of_source in zip("abcdef", lengths, strict=False)
    ]
    manifest.write(paths.manifest, manifest.StepSpec("tokenize", {}), {}, {"sources": sources}, 0.0)
    return owner


def some_lengths(seed: int, totals: Sequence[int]) -> list[list[int]]:
    """Lengths of documents that together have so many tokens in each source."""
    chance = random.Random(seed)
    lengths: list[list[int]] = []
    for total in totals:
        lengths.append([])
        while (left := total - sum(lengths[-1])) > 0:
            lengths[-1].append(min(left, chance.randint(1, 40)))
    return lengths


def plainly(weights: Sequence[float], num: int) -> list[int]:
    """Give each seat to the source with the lowest (2n + 1) / w, n being what it has."""
    exact, counts, seats = [Fraction(str(weight)) for weight in weights], [0] * len(weights), []
    for _ in range(num):
        keys = [((2 * n + 1) / w, s) for s, (n, w) in enumerate(zip(counts, exact, strict=True)) if w]
        seats.append(min(keys)[1])
        counts[seats[-1]] += 1
    return seats


def settings(folder: Path, num_sources: int, *overrides: str) -> PretrainConfig:
    entries = "[" + ", ".join(f"{name}.jsonl" for name in "abcdef"[:num_sources]) + "]"
    return load(
        PretrainConfig, "/dev/null", [f"input_jsonl={entries}", f"output_prefix={folder / 'tokens'}", *overrides]
    )


def data_plan(config: PretrainConfig) -> DataPlan:
    return DataPlan.from_config(config)


def sample_at(order: SampleOrder | MixedOrder, position: int) -> tuple[int, int]:
    """Epoch and index of the sample at one position."""
    epochs, indices = order.at_many(np.array([position], dtype=np.int64))
    return int(epochs[0]), int(indices[0])


def consumption_of(config: PretrainConfig) -> Consumption:
    plan = data_plan(config)
    return consumption(plan, Schedule.from_config(config, *extent_of(plan)))
