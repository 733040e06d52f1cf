"""What the curves are called that `metrics.jsonl` only numbers, by the configuration that lies beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from zerokara.config.loading import load
from zerokara.config.pretrain_config import RESOLVED_NAME, PretrainConfig
from zerokara.corpus.inputs import FORMAT_OF_SUFFIX, LIST_MARK, PACKING_OF_SUFFIX
from zerokara.errors import UserError

_MOST_CHARACTERS = 28
"""Of a name: a legend should not hide the curves."""
_ENDINGS = (*PACKING_OF_SUFFIX, *FORMAT_OF_SUFFIX, ".parquet")


@dataclass(frozen=True)
class CurveNames:
    """Names in the order of the numbers."""

    of_sources: tuple[str, ...] = ()
    of_sparse_layers: tuple[str, ...] = ()

    def source(self, number: int) -> str:
        """The name of a source, counted from 0: its file or folder."""
        return self.of_sources[number] if number < len(self.of_sources) else f"source {number + 1}"

    def sparse_layer(self, number: int) -> str:
        """The name of a layer with experts, counted from 0 among these: its number among all layers."""
        there = self.of_sparse_layers
        return there[number] if number < len(there) else f"sparse layer {number + 1}"


def of_run(run_dir: Path) -> CurveNames:
    """The names of a run; none where its configuration cannot be read, for a picture should not fail by that."""
    try:
        settings = load(PretrainConfig, run_dir / RESOLVED_NAME)
    except (UserError, OSError):
        return CurveNames()
    stacks = ("encoder ", "decoder ") if settings.traits.is_encoder_decoder else ("",)
    layers = tuple(f"{stack}layer {layer}" for stack in stacks for layer in settings.sparse)
    return CurveNames(_names_of(settings.input_jsonl), layers)


def _names_of(entries: Sequence[str]) -> tuple[str, ...]:
    names = [_short(entry) for entry in entries]
    times = Counter(names)
    return tuple(
        name if name and times[name] == 1 else f"source {number} {name}".rstrip()
        for number, name in enumerate(names, start=1)
    )


def _short(entry: str) -> str:
    """`data/ko/ko_reviews.jsonl.gz` is ko_reviews, `hf://datasets/owner/name@v1` is name@v1."""
    name = PurePosixPath(entry.removeprefix(LIST_MARK)).name
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return name if len(name) <= _MOST_CHARACTERS else f"{name[: _MOST_CHARACTERS - 1]}…"
