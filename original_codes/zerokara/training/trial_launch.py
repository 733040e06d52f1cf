"""Trials from the launching process: one of the plan as it is, or as many as find the micro batch that fits a GPU."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from zerokara.errors import RunError
from zerokara.progress import bytes_text
from zerokara.training.planning.memory import min_activation_bytes
from zerokara.training.planning.memory_forecast import MemoryForecast
from zerokara.training.planning.micro_batch import choose_micro_batch
from zerokara.training.planning.run_plan import RunPlan, with_micro_batch
from zerokara.training.processes import launcher
from zerokara.training.spawning import processes_text, spawn


@dataclass(frozen=True)
class TrialResult:
    """What a trial measured."""

    peak_bytes: int
    """Memory of the fullest process."""
    seconds_per_step: float


@dataclass(frozen=True)
class Trial:
    """A trial that passed."""

    plan: RunPlan
    """With its micro batch, where that is `auto`."""
    result: TrialResult


def try_steps(plan: RunPlan, forecast: MemoryForecast) -> Trial:
    """Train a few steps that leave nothing behind.

    Raises:
        RunError: they failed, or ran out of memory with a micro batch that the user chose or that is 1.
    """
    print(f"trying a few steps in {processes_text(plan)}", flush=True)
    if plan.given.micro_batch_size != "auto":
        if (result := _tried(plan)) is None:
            raise _failed(launcher.OUT_OF_MEMORY)
        return Trial(plan, result)
    return _on_gpu(plan, forecast) if forecast.machine.device == "cuda" else _on_cpu(plan, forecast)


def _on_gpu(plan: RunPlan, forecast: MemoryForecast) -> Trial:
    """Find the largest micro batch that fits, from the measured peaks of small ones."""
    layout, limit_bytes = forecast.layout, forecast.peak_limit_bytes
    sequence_bytes = min_activation_bytes(replace(layout, micro_batch_size=1))
    results: dict[int, TrialResult | None] = {}
    while True:
        peaks = {size: None if result is None else result.peak_bytes for size, result in results.items()}
        size = choose_micro_batch(peaks, layout.micro_batch_sizes, limit_bytes, sequence_bytes)
        if size in results:
            break
        print(f"micro_batch_size: auto: trying {size}", flush=True)
        results[size] = result = _tried(with_micro_batch(plan, size))
        fits = result is not None and result.peak_bytes <= limit_bytes
        held = "ran out of memory" if result is None else f"held {bytes_text(result.peak_bytes)}"
        print(f"micro_batch_size: auto: {size} {'fits' if fits else 'does not fit'}: a process {held}", flush=True)
    chosen = results[size]
    if chosen is None:
        raise _failed(launcher.OUT_OF_MEMORY)
    return Trial(with_micro_batch(plan, size), chosen)


def _on_cpu(plan: RunPlan, forecast: MemoryForecast) -> Trial:
    """Try the size of the plan, and smaller ones where it runs out of memory."""
    while (result := _tried(plan)) is None:
        smaller = [size for size in forecast.layout.micro_batch_sizes if size <= plan.config.micro_batch // 2]
        if not smaller:
            raise _failed(launcher.OUT_OF_MEMORY)
        print(f"micro_batch_size: auto: {plan.config.micro_batch} does not fit, trying {smaller[-1]}", flush=True)
        plan = with_micro_batch(plan, smaller[-1])
    return Trial(plan, result)


def _tried(plan: RunPlan) -> TrialResult | None:
    """Run a trial; None where a process ran out of memory."""
    with tempfile.TemporaryDirectory(prefix="zerokara-trial-") as folder:
        path = Path(folder, "result.json")
        code = spawn(plan, "trial", str(path))
        if code == launcher.OUT_OF_MEMORY:
            return None
        if code:
            raise _failed(code)
        return TrialResult(**json.loads(path.read_bytes()))


def _failed(code: int) -> RunError:
    return RunError(f"the trial ended with exit code {code}; the messages above say why. Nothing was written")
