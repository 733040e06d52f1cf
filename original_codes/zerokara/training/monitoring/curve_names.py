"""Names of the curves that `metrics.jsonl` only numbers, from the configuration in the same folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from zerokara.config.loading import load
from zerokara.config.pretrain_config import RESOLVED_NAME, PretrainConfig
from zerokara.corpus.inputs import FORMAT_OF_SUFFIX, LIST_MARK, PACKING_OF_SUFFIX
from zerokara.errors import UserError

_MAX_CHARACTERS = 28
"""Longest name: a legend should not hide the curves."""
_ENDINGS = (*PACKING_OF_SUFFIX, *FORMAT_OF_SUFFIX, ".parquet")


@dataclass(frozen=True)
class CurveNames:
    """Names of sources and MoE layers, in the order of their numbers."""

    sources: tuple[str, ...] = ()
    moe_layers: tuple[str, ...] = ()

    def source(self, number: int) -> str:
        """Name of a source, counted from 0: its file or folder."""
        return self.sources[number] if number < len(self.sources) else f"source {number + 1}"

    def moe_layer(self, number: int) -> str:
        """Name of a layer with experts, counted from 0 among these: its number among all layers."""
        return self.moe_layers[number] if number < len(self.moe_layers) else f"MoE layer {number + 1}"


def of_run(run_dir: Path) -> CurveNames:
    """Names of a run; without a readable configuration there are none, and the plots are drawn all the same."""
    try:
        settings = load(PretrainConfig, run_dir / RESOLVED_NAME)
    except (UserError, OSError):
        return CurveNames()
    stacks = ("encoder ", "decoder ") if settings.traits.is_encoder_decoder else ("",)
    layers = tuple(f"{stack}layer {layer}" for stack in stacks for layer in settings.expert_layers)
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
    return name if len(name) <= _MAX_CHARACTERS else f"{name[: _MAX_CHARACTERS - 1]}…"
