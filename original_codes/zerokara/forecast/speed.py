"""The speed and memory of this machine: measured steps of two model sizes, and the forecast for the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from zerokara.config.architectures import SizeName
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.writing import overrides
from zerokara.model.shapes import ModelShape
from zerokara.resources import available_cores
from zerokara.training import trials
from zerokara.training.planning import recipe, run_plan
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.trials import try_steps

MEASURED: dict[str, tuple[SizeName, SizeName]] = {"cpu": ("1M", "10M"), "cuda": ("60M", "350M")}
"""Sizes whose steps are measured, by device: the range of what users train there."""
_BATCH = {"cpu": 8, "cuda": 64}
"""Sequences per core or GPU in a measured step; more are no faster."""
LEFT_TO_RECIPE: dict[str, Any] = dict.fromkeys([*recipe.RULES, "warmup_fraction"], "auto")


@dataclass(frozen=True)
class Speed:
    """Training speed of a machine: a token costs a fixed time and the time of its operations."""

    seconds_per_token: float
    seconds_per_flop: float

    @classmethod
    def of(cls, small: tuple[float, float], large: tuple[float, float]) -> Speed:
        """Draw the line through two measured sizes (FLOPs and seconds of a token), neither part of it below 0."""
        (flops, seconds), (flops_of_large, seconds_of_large) = small, large
        slope = (seconds_of_large - seconds) / (flops_of_large - flops)
        per_flop = min(max(0.0, slope), seconds_of_large / flops_of_large)
        return cls(seconds_of_large - per_flop * flops_of_large, per_flop)

    def seconds_of_token(self, shape: ModelShape) -> float:
        """Seconds to train on one token."""
        return self.seconds_per_token + self.seconds_per_flop * shape.flops_per_token()


def size_settings(name: SizeName | Literal[""]) -> dict[str, Any]:
    """Return the settings of a size by name, which leave none of another size's."""
    shape = ("num_layers", "hidden_size", "num_attn_heads", "num_kv_heads", "head_dim", "ffn_hidden_size")
    return {"model_size": name, **dict.fromkeys(shape, "auto")}


@dataclass(frozen=True)
class Planner:
    """Plans of runs that differ from the user's configuration, a file and what was set on the command line."""

    config_path: Path
    overrides: tuple[str, ...]

    def config(self, **settings: Any) -> PretrainConfig:
        """Load the user's configuration with these settings."""
        return load(PretrainConfig, self.config_path, [*self.overrides, *overrides(settings)])

    def local_plan(self, **settings: Any) -> RunPlan:
        """Plan such a run on this machine."""
        return trials.on_this_machine(run_plan.make_plan(self.config(**settings)))

    @cached_property
    def device(self) -> str:
        """Device that the runs compute on."""
        return self.local_plan().memory.device

    def measure_speed(self) -> Speed:
        """Train a few steps of two sizes; leaves nothing behind."""
        on_cpu = self.device == "cpu"
        batch = _BATCH[self.device] * (available_cores() if on_cpu else self.local_plan().num_processes)
        sizes = MEASURED[self.device]
        return Speed.of(*(self.measure({**size_settings(name), "global_batch_size": batch}) for name in sizes))

    def measure(self, settings: Mapping[str, Any]) -> tuple[float, float]:
        """Measure FLOPs and seconds of a token in a few steps of a run with these settings."""
        settings = {**settings, "micro_batch_size": "auto", "warmup_fraction": 0.0}
        plan, result = try_steps(self.local_plan(**settings))
        return plan.shape.flops_per_token(), result.seconds_per_step / plan.schedule.batch_tokens

    def memory(self, name: SizeName) -> tuple[float, bool]:
        """Forecast the bytes of a size on a GPU, or on a machine without any, and whether they fit."""
        forecast = self.local_plan(**size_settings(name), micro_batch_size="auto").memory
        return forecast.pools[0].needed_bytes(), forecast.fits

    def num_steps(self, name: SizeName, tokens: float) -> int:
        """Count the optimizer steps of a size, with the batch of the recipe."""
        settings = {**size_settings(name), **LEFT_TO_RECIPE, "train_tokens": int(tokens)}
        return self.local_plan(**settings).schedule.num_steps
