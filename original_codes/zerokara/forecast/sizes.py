"""Tokens, time, memory and expected loss of each model size, on this machine and corpus, in given hours or tokens.

In: measured steps of two sizes, the tokens of the corpus, a scaling law. Out: for each size its tokens, hours and
expected bits per byte, and the size to take: that with the fewest, or a smaller one within half a percent of it.

Tokens that are read again teach less: R further epochs of U tokens are worth U·R*·(1 - e^(-R/R*)) fresh ones with
R* = 15.4 (Muennighoff et al., 2023, arXiv 2305.16264).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from zerokara.base.errors import RunError
from zerokara.base.progress import bytes_text, count_text, seconds_text
from zerokara.base.resources import available_cores
from zerokara.config.loading import load
from zerokara.config.model import SizeName
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.writing import overrides
from zerokara.model.shapes import ModelShape
from zerokara.training import auto_settings
from zerokara.training.auto_settings import try_steps
from zerokara.training.planning import recipe, run_plan
from zerokara.training.planning.run_plan import RunPlan

MEASURED: dict[str, tuple[SizeName, SizeName]] = {"cpu": ("1M", "10M"), "cuda": ("60M", "350M")}
"""Sizes whose steps are measured, by device: the range of what users train there."""
_BATCH = {"cpu": 8, "cuda": 64}
"""Sequences per core or GPU in a measured step; more are no faster."""
LEFT_TO_RECIPE: dict[str, Any] = dict.fromkeys(
    [*recipe.RULES, "warmup_fraction", "max_steps", "micro_batch_size"], "auto"
)
REPETITIONS_WORTH = 15.4  # R*
RULE_OF_THUMB = 20  # tokens per parameter where nothing better is known (Hoffmann et al., 2022)
MANY_EPOCHS, REPEATED_RULE = 12, 2.5  # tokens per parameter in a run of 12 epochs or more (docs/recipe.md)
VALIDATION_COST = 2 / 3  # time of a validation token, in training tokens: no backward pass, overlapping windows
MIN_TOKENS_PER_PARAMETER = 0.2  # sizes with fewer are not shown
GOOD_ENOUGH = 1.005  # ratio to the fewest bits per byte, up to which a smaller model is taken: it is cheaper to use


@dataclass(frozen=True)
class Speed:
    """Training speed of a machine: a token costs a fixed time and the time of its operations."""

    seconds_per_token: float
    seconds_per_flop: float

    @classmethod
    def of(cls, small: tuple[float, float], large: tuple[float, float]) -> "Speed":
        """Draw the line through two measured sizes (FLOPs and seconds of a token), neither part of it below 0."""
        (flops, seconds), (flops_of_large, seconds_of_large) = small, large
        slope = (seconds_of_large - seconds) / (flops_of_large - flops)
        per_flop = min(max(0.0, slope), seconds_of_large / flops_of_large)
        return cls(seconds_of_large - per_flop * flops_of_large, per_flop)

    def seconds_of_token(self, shape: ModelShape) -> float:
        return self.seconds_per_token + self.seconds_per_flop * shape.flops_per_token()


def size_settings(name: SizeName | Literal[""]) -> dict[str, Any]:
    """Return the settings of a size by name, which leave none of another size's."""
    shape = ("num_layers", "hidden_size", "num_attn_heads", "num_kv_heads", "head_dim", "ffn_hidden_size")
    return {"model_size": name, **dict.fromkeys((*shape, "moe_layers", "moe_ffn_hidden_size"), "auto")}


@dataclass(frozen=True)
class Planner:
    """Plans of runs that differ from the user's configuration, a file and what was set on the command line."""

    config_path: Path
    overrides: tuple[str, ...]
    teachers: int = 0
    """Models of the same size from which one more learns."""

    def config(self, **settings: Any) -> PretrainConfig:
        """Load the user's configuration with these settings; RunError if the file is no longer what it was."""
        if self.config_path.read_bytes() != self._content:
            raise RunError(f"{self.config_path} has changed since this command began: start it again")
        return load(PretrainConfig, self.config_path, [*self.overrides, *overrides(settings)])

    def local_plan(self, **settings: Any) -> RunPlan:
        """Plan such a run on this machine."""
        return auto_settings.on_this_machine(run_plan.make_plan(self.config(**settings)))

    @cached_property
    def _content(self) -> bytes:
        return self.config_path.read_bytes()

    @cached_property
    def device(self) -> str:
        return self.local_plan().memory.device

    def measure_speed(self) -> Speed:
        """Train a few steps of two sizes; leaves nothing behind."""
        plan = self.local_plan()
        batch = _BATCH[self.device] * (available_cores() if self.device == "cpu" else plan.num_processes)
        batch = int(min(batch, plan.schedule.samples_per_epoch))
        batch = max(1, batch // plan.num_processes) * plan.num_processes
        sizes = MEASURED[self.device]
        return Speed.of(*(self.measure({**size_settings(name), "global_batch_size": batch}) for name in sizes))

    def measure(self, settings: Mapping[str, Any]) -> tuple[float, float]:
        """Measure FLOPs and seconds of a token in a few steps of a run with these settings."""
        settings = {**LEFT_TO_RECIPE, "stages": (), **settings, "warmup_fraction": 0.0}
        plan, result = try_steps(self.local_plan(**settings))
        return plan.shape.flops_per_token(), result.seconds_per_step / plan.schedule.batch_tokens

    def outlook(self, name: SizeName, tokens: float) -> "Outlook":
        """Plan a run of a size with the recipe's batch. The batch decides on the processes, and these on the memory."""
        settings = {**size_settings(name), **LEFT_TO_RECIPE}
        plan = self.local_plan(**settings, train_tokens=max(1, int(tokens)))
        config, steps, there = plan.resolved, plan.schedule.num_steps, plan.data.num_valid_tokens
        each = there if config.eval_tokens == "all" else min(there, config.eval_tokens)
        validated = each * (1 + math.ceil(steps / config.eval_interval))
        memory = replace(plan.memory, teachers=self.teachers * plan.shape.num_parameters())
        return Outlook(memory.pools[0].needed_bytes, memory.fits, steps, VALIDATION_COST * validated / tokens)


class Outlook(NamedTuple):
    """Memory, steps and validations of a planned run on this machine."""

    memory_bytes: float
    """Of one GPU, or of the whole machine if it has none."""
    fits: bool
    steps: int
    validation: float
    """Time of all validations, as a share of that of the training steps."""


@dataclass(frozen=True)
class Prediction:
    """Bits per byte, with an interval of 95 %."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Candidate:
    """The run of one size: tokens, hours, memory and expected loss."""

    name: SizeName
    shape: ModelShape
    tokens: float
    epochs: float
    hours: float
    prediction: Prediction | None
    """None where there is no law."""
    memory_bytes: float
    fits: bool
    steps: int

    @property
    def tokens_per_parameter(self) -> float:
        """Fresh tokens per parameter; repeated ones count for what they are worth."""
        return fresh_worth(self.tokens, self.tokens / self.epochs) / self.shape.num_parameters(padded=False)

    @property
    def is_sensible(self) -> bool:
        """True if it fits, and has tokens enough to be shown."""
        return self.fits and self.tokens_per_parameter >= MIN_TOKENS_PER_PARAMETER


def effective_parameters(shape: ModelShape) -> float:
    """Return N of the scaling law: multiplications per token, those of output projection and attention included."""
    return shape.flops_per_token() / 6


def fresh_worth(tokens: float, unique_tokens: float) -> float:
    """Return the number of fresh tokens that would teach as much as these, of which some are read again."""
    repetitions = tokens / unique_tokens - 1
    if repetitions <= 0:
        return tokens
    return unique_tokens * (1 + REPETITIONS_WORTH * (1 - math.exp(-repetitions / REPETITIONS_WORTH)))


def candidate(
    name: SizeName,
    shape: ModelShape,
    outlook: Callable[[SizeName, float], Outlook],
    speed: Speed,
    predict: Callable[[float, float], Prediction] | None,
    limits: tuple[float, float],
    unique_tokens: float,
) -> Candidate:
    """Return the run of a size within `limits`, hours and tokens (either may be infinite), on a corpus of so many.

    `predict` is that of a scaling law, which takes N (`effective_parameters`) and D, tokens that are read once.
    """
    seconds, least = speed.seconds_of_token(shape), MIN_TOKENS_PER_PARAMETER * shape.num_parameters(padded=False)
    tokens = min(limits[0] * 3600 / seconds, limits[1])
    for _ in range(8):  # fewer tokens need fewer validations, which take part of the hours
        seen, before = outlook(name, max(tokens, least)), tokens  # the batch of fewer may fit no processes
        hours_of_token = seconds * (1 + seen.validation) / 3600
        tokens = min(limits[0] / hours_of_token, limits[1])
        if abs(tokens - before) <= 0.01 * before:
            break
    prediction = predict(effective_parameters(shape), fresh_worth(tokens, unique_tokens)) if predict else None
    epochs, hours = tokens / unique_tokens, tokens * hours_of_token
    steps = max(1, round(seen.steps * min(1.0, tokens / least)))
    return Candidate(name, shape, tokens, epochs, hours, prediction, seen.memory_bytes, seen.fits, steps)


def recommended(candidates: Sequence[Candidate]) -> Candidate | None:
    """Choose a size from candidates in ascending order; None where none fits."""
    # With hardly a token for each parameter, so far from any run, no law is to be believed.
    fitting = [size for size in candidates if size.is_sensible] or [size for size in candidates if size.fits][:1]
    values = {size.name: size.prediction.value for size in fitting if size.prediction}
    if not values:  # the largest with tokens enough for each parameter, or else the smallest
        rules = [REPEATED_RULE if size.epochs >= MANY_EPOCHS else RULE_OF_THUMB for size in fitting]
        ample = [size for size, rule in zip(fitting, rules, strict=True) if size.tokens_per_parameter >= rule]
        return (ample[-1] if ample else fitting[0]) if fitting else None
    best = min(values.values())
    return next(size for size in fitting if values[size.name] <= GOOD_ENOUGH * best)


def table(shown: Sequence[Candidate], chosen: Candidate) -> list[str]:
    last = "bits per byte (95 %)" if chosen.prediction else "tokens a parameter"
    columns = f"{'parameters':>10} {'tokens':>8} {'epochs':>7} {'steps':>9} {'memory':>9} {'time':>14}"
    lines = [f"  {'size':<6} {columns}  {last}"]
    for size in shown:
        parameters = count_text(size.shape.num_parameters(padded=False))
        lines.append(
            f"{'→' if size is chosen else ' '} {size.name:<6} {parameters:>10} "
            f"{count_text(size.tokens):>8} {size.epochs:>7.2f} {size.steps:>9,} {bytes_text(size.memory_bytes):>9} "
            f"{seconds_text(3600 * size.hours):>14}  {size.prediction or f'{size.tokens_per_parameter:.1f}'}"
        )
    return lines
