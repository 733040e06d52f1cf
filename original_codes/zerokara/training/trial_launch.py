"""Trials from the launching process: one of the plan as it is, or as many as find the micro batch that fits a GPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from zerokara.errors import RunError
from zerokara.progress import bytes_text
from zerokara.training.planning.memory import min_activation_bytes
from zerokara.training.planning.memory_forecast import MemoryForecast
from zerokara.training.planning.micro_batch import choose_micro_batch
from zerokara.training.planning.run_plan import RunPlan, with_micro_batch
from zerokara.training.processes import launcher
from zerokara.training.spawning import Commands, processes_text, spawn

PEAK_FILE_NAME = "ZEROKARA_TRIAL_PEAK_FILE"
"""Environment variable with the file into which the first process of a trial writes its peak memory in bytes."""


def try_steps(plan: RunPlan, forecast: MemoryForecast, commands: Commands) -> RunPlan:
    """Train a few steps that leave nothing behind; return the plan that passed, with its micro batch where it is auto.

    Raises:
        RunError: they failed, or ran out of memory with a micro batch that the user chose or that is 1.
    """
    print(f"trying a few steps in {processes_text(plan)}", flush=True)
    if plan.given.micro_batch_size != "auto":
        if _peak_of(plan, commands) is None:
            raise _failed(launcher.OUT_OF_MEMORY)
        return plan
    return _on_gpu(plan, forecast, commands) if forecast.machine.device == "cuda" else _on_cpu(plan, forecast, commands)


def _on_gpu(plan: RunPlan, forecast: MemoryForecast, commands: Commands) -> RunPlan:
    """Find the largest micro batch that fits, from the measured peaks of small ones."""
    layout, limit_bytes = forecast.layout, forecast.peak_limit_bytes
    sequence_bytes = min_activation_bytes(replace(layout, micro_batch_size=1))
    peaks: dict[int, int | None] = {}
    while True:
        size = choose_micro_batch(peaks, layout.micro_batch_sizes, limit_bytes, sequence_bytes)
        if size in peaks:
            break
        print(f"micro_batch_size: auto: trying {size}", flush=True)
        peaks[size] = peak = _peak_of(with_micro_batch(plan, size), commands)
        fits = peak is not None and peak <= limit_bytes
        held = "ran out of memory" if peak is None else f"held {bytes_text(peak)}"
        print(f"micro_batch_size: auto: {size} {'fits' if fits else 'does not fit'}: a process {held}", flush=True)
    if peaks[size] is None:
        raise _failed(launcher.OUT_OF_MEMORY)
    return with_micro_batch(plan, size)


def _on_cpu(plan: RunPlan, forecast: MemoryForecast, commands: Commands) -> RunPlan:
    """Try the size of the plan, and smaller ones where it runs out of memory."""
    while _peak_of(plan, commands) is None:
        smaller = [size for size in forecast.layout.micro_batch_sizes if size <= plan.config.micro_batch // 2]
        if not smaller:
            raise _failed(launcher.OUT_OF_MEMORY)
        print(f"micro_batch_size: auto: {plan.config.micro_batch} does not fit, trying {smaller[-1]}", flush=True)
        plan = with_micro_batch(plan, smaller[-1])
    return plan


def _peak_of(plan: RunPlan, commands: Commands) -> int | None:
    """Run a trial; return the peak memory of its fullest process, None where one ran out of memory."""
    with _peak_file() as path:
        code = spawn(plan, commands, "--dry-run")
        if code == launcher.OUT_OF_MEMORY:
            return None
        if code:
            raise _failed(code)
        return int(path.read_text(encoding="ascii"))


@contextmanager
def _peak_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="zerokara-trial-") as folder:
        path = Path(folder, "peak_bytes")
        os.environ[PEAK_FILE_NAME] = str(path)
        try:
            yield path
        finally:
            del os.environ[PEAK_FILE_NAME]


def _failed(code: int) -> RunError:
    return RunError(f"the trial ended with exit code {code}; the messages above say why. Nothing was written")
