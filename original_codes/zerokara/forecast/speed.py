"""How fast this machine trains, and what its memory holds: real steps of two sizes, and the forecast of the others."""

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
from zerokara.training import launching
from zerokara.training.launching import try_steps
from zerokara.training.planning import recipe, run_plan
from zerokara.training.planning.run_plan import RunPlan

MEASURED: dict[str, tuple[SizeName, SizeName]] = {"cpu": ("1M", "10M"), "cuda": ("60M", "350M")}
"""Sizes whose steps are measured, by device: what users train there lies between or near them."""
_BATCH = {"cpu": 8, "cuda": 64}
"""Sequences in a measured step, for each core or GPU: as fast as larger ones."""
LEFT_TO_RECIPE: dict[str, Any] = dict.fromkeys([*recipe.RULES, "warmup_fraction"], "auto")


@dataclass(frozen=True)
class Speed:
    """Training speed of a machine: a token costs a fixed time and the time of its operations."""

    seconds_per_token: float
    seconds_per_flop: float

    @classmethod
    def of(cls, small: tuple[float, float], large: tuple[float, float]) -> Speed:
        """The line through two measured sizes: FLOPs and seconds of a token, neither of the two parts below 0."""
        (flops, seconds), (flops_of_large, seconds_of_large) = small, large
        slope = (seconds_of_large - seconds) / (flops_of_large - flops)
        per_flop = min(max(0.0, slope), seconds_of_large / flops_of_large)
        return cls(seconds_of_large - per_flop * flops_of_large, per_flop)

    def seconds_of_token(self, shape: ModelShape) -> float:
        """Seconds to train on one token."""
        return self.seconds_per_token + self.seconds_per_flop * shape.flops_per_token()


def size_settings(name: SizeName | Literal[""]) -> dict[str, Any]:
    """The settings of a size by name; none of another size's stays."""
    shape = ("num_layers", "hidden_size", "num_attn_heads", "num_kv_heads", "head_dim", "ffn_hidden_size")
    return {"model_size": name, **dict.fromkeys(shape, "auto")}


@dataclass(frozen=True)
class Planner:
    """Plans of runs that differ from the user's configuration."""

    config_path: Path
    overrides: tuple[str, ...]
    """What the user set on the command line."""

    def config(self, **settings: Any) -> PretrainConfig:
        """The user's configuration with these settings."""
        return load(PretrainConfig, self.config_path, [*self.overrides, *overrides(settings)])

    def local_plan(self, **settings: Any) -> RunPlan:
        """The plan of such a run on this machine."""
        return launching.on_this_machine(run_plan.make_plan(self.config(**settings)))

    @cached_property
    def device(self) -> str:
        """Where the runs compute."""
        return self.local_plan().memory.device

    def measure_speed(self) -> Speed:
        """Train a few steps of two sizes; leaves nothing behind."""
        on_cpu = self.device == "cpu"
        batch = _BATCH[self.device] * (available_cores() if on_cpu else self.local_plan().num_processes)
        sizes = MEASURED[self.device]
        return Speed.of(*(self.measure({**size_settings(name), "global_batch_size": batch}) for name in sizes))

    def measure(self, settings: Mapping[str, Any]) -> tuple[float, float]:
        """FLOPs and seconds of a token, from a few steps of a run with these settings."""
        settings = {**settings, "micro_batch_size": "auto", "warmup_fraction": 0.0}
        plan, result = try_steps(self.local_plan(**settings))
        return plan.shape.flops_per_token(), result.seconds_per_step / plan.schedule.batch_tokens

    def memory(self, name: SizeName) -> tuple[float, bool]:
        """Bytes that a size takes where it is computed, a GPU or a machine without any, and whether they fit.

        With the micro batch that it would have, or else with one sequence.
        """
        forecast = self.local_plan(**size_settings(name), micro_batch_size="auto").memory
        if not forecast.fits:
            forecast = forecast.with_settings(micro_batch_size=1)
        return forecast.pools[0].needed_bytes(), forecast.fits

    def num_steps(self, name: SizeName, tokens: float) -> int:
        """Optimizer steps of a size, with the batch of the recipe."""
        settings = {**size_settings(name), **LEFT_TO_RECIPE, "train_tokens": int(tokens)}
        return self.local_plan(**settings).schedule.num_steps
