"""How fast this machine trains, and what its memory holds: real steps of two sizes, and the forecast of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from zerokara.config.architectures import SizeName
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.forecast import ladder
from zerokara.forecast.seats import Seat, seats
from zerokara.forecast.sizes import Candidate, Memory, Speed
from zerokara.resources import available_cores
from zerokara.training import launching
from zerokara.training.launching import LocalPlan
from zerokara.training.micro_batch import try_steps
from zerokara.training.planning import recipe, run_plan

MEASURED: dict[str, tuple[SizeName, SizeName]] = {"cpu": ("1M", "10M"), "cuda": ("60M", "350M")}
"""Sizes whose steps are measured, by device: what users train there lies between or near them."""
_BATCH = {"cpu": 8, "cuda": 64}
"""Sequences in a measured step, for each core or GPU: as fast as larger ones."""
LEFT_TO_RECIPE: dict[str, Any] = dict.fromkeys([*recipe.RULES, "warmup_fraction"], "auto")

_SHAPE_KEYS = ("num_layers", "hidden_size", "num_attn_heads", "num_kv_heads", "head_dim", "ffn_hidden_size")


def size_settings(name: SizeName) -> dict[str, Any]:
    """The settings of a size by name; none of another size's stays."""
    return {"model_size": name, **dict.fromkeys(_SHAPE_KEYS, "auto")}


@dataclass(frozen=True)
class Planner:
    """Makes plans of runs that differ from the user's configuration."""

    config_path: Path
    overrides: tuple[str, ...]
    """What the user set on the command line."""

    def config(self, **settings: Any) -> PretrainConfig:
        """The user's configuration with these settings.

        Raises:
            UserError: they break a rule.
        """
        return load(PretrainConfig, self.config_path, [*self.overrides, *overrides(settings)])

    def local_plan(self, **settings: Any) -> LocalPlan:
        """The plan of such a run on this machine.

        Raises:
            UserError: as for any run.
        """
        given = self.config(**settings)
        processes = 1 if given.num_processes == "auto" else given.num_processes
        return launching.on_this_machine(run_plan.make_plan(given, processes), redo=True)

    @cached_property
    def device(self) -> str:
        """Where the runs compute."""
        return self.local_plan().memory_forecast.device

    @cached_property
    def identity(self) -> str:
        """What a law holds for: the kind of model, the tokenizer, the data and the recipe."""
        plan = self.local_plan().plan
        model = f"{plan.config.architecture} {plan.config.seq_len} {self.alone['optimizer']}"
        return f"{model} {plan.encoder.sha256} {plan.data.sha256} {plan.config.eval_tokens} {recipe.VERSION}"

    @cached_property
    def alone(self) -> dict[str, Any]:
        """Settings of a small run, which is one process, and learns by the optimizer of the run that is planned."""
        optimizer = self.local_plan(**LEFT_TO_RECIPE).plan.config.optimizer
        return {
            "num_processes": 1,
            "tensor_parallel_size": 1,
            "offload": "none",
            "micro_batch_size": "auto",
            **LEFT_TO_RECIPE,
            "optimizer": optimizer,
        }

    def seats(self, most: int) -> list[Seat]:
        """Where small runs train beside each other."""
        return seats(most, 0 if self.device == "cpu" else self.local_plan().plan.num_processes)

    def measure_speed(self) -> Speed:
        """Train a few steps of two sizes; leaves nothing behind.

        Raises:
            RunError: they failed.
        """
        on_cpu = self.device == "cpu"
        batch = _BATCH[self.device] * (available_cores() if on_cpu else self.local_plan().plan.num_processes)
        return Speed.of(
            [self._measured({**size_settings(name), "global_batch_size": batch}) for name in MEASURED[self.device]]
        )

    def measure_small_speed(self, seat: Seat) -> Speed:
        """The speed of a small run in its place.

        Raises:
            RunError: the steps failed.
        """
        settings = {**self.alone, "global_batch_size": 2 * ladder.MIN_BATCH}
        with seat.taken():
            return Speed.of([self._measured({**settings, **ladder.TINY[each]}) for each in (0, 4)])

    def _measured(self, settings: Mapping[str, Any]) -> tuple[float, float]:
        """FLOPs and seconds of a token."""
        settings = {**settings, "micro_batch_size": "auto", "warmup_fraction": 0.0}
        local = self.local_plan(**settings)
        _, result = try_steps(local.plan, local.memory_forecast)
        return local.plan.shape.flops_per_token(), result.seconds_per_step / local.plan.schedule.batch_tokens

    def memory(self, name: SizeName) -> Memory:
        """What a size takes of this machine: with the micro batch that it would have, or else with one sequence."""
        forecast = self.local_plan(**size_settings(name), micro_batch_size="auto").memory_forecast
        if not forecast.fits:
            forecast = replace(forecast, micro_batch_size=1)
        return Memory(forecast.ample_bytes, forecast.fits)

    def num_steps(self, candidate: Candidate) -> int:
        """Optimizer steps of a size, with the batch of the recipe."""
        settings = {**size_settings(candidate.name), **LEFT_TO_RECIPE, "train_tokens": int(candidate.tokens)}
        return self.local_plan(**settings).plan.schedule.num_steps


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """Settings as `--set` takes them."""
    return [f"{key}={repr('') if value == '' else value}" for key, value in settings.items()]
