"""The micro batch of `micro_batch_size: auto`, and the trials that measure what a run takes.

On a GPU it is the largest that fits, found by trials whose peak memory is measured; on a CPU as many tokens as make it
fastest. A micro batch of another size adds the same numbers up in another order, so the choice is kept in the run
folder with all that it was made for, and made again only when some of that has changed.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from zerokara.durable import write_json
from zerokara.errors import RunError
from zerokara.progress import bytes_text
from zerokara.training.planning.memory import MemoryForecast, min_activation_bytes
from zerokara.training.planning.run_plan import RunPlan, with_micro_batch
from zerokara.training.processes import launcher
from zerokara.training.spawning import processes_text, spawn

CPU_TOKENS = 2048
"""On a CPU no size is larger than the first with so many tokens: a larger matrix product is no faster. Measured."""
FILE_NAME = "machine.json"


def first_choice(forecast: MemoryForecast) -> int:
    """Return the largest size that almost certainly fits, on a CPU no larger than is faster; 1 where none does."""
    sizes = forecast.micro_batch_sizes
    if forecast.device == "cpu":
        enough = [size for size in sizes if size * forecast.shape.input_len >= CPU_TOKENS]
        sizes = [size for size in sizes if not enough or size <= enough[0]]
    return next((size for size in reversed(sizes) if replace(forecast, micro_batch_size=size).fits), 1)


def kept_choice(run_dir: Path, forecast: MemoryForecast) -> tuple[int | None, bool]:
    """Return the size of this run's last start with `auto` (None without one), and whether it still holds.

    It holds for the same layout on the same machine, however busy that is.
    """
    path = run_dir / FILE_NAME
    if not path.exists():
        return None, False
    kept = orjson.loads(path.read_bytes())
    was = kept["chosen_for"]
    return kept["micro_batch_size"], all(was.get(key) == value for key, value in _made_for(forecast).items())


def keep_choice(run_dir: Path, forecast: MemoryForecast, size: int) -> None:
    """Write a choice down for the next start."""
    write_json(run_dir / FILE_NAME, {"micro_batch_size": size, "chosen_for": _made_for(forecast)})


def _made_for(forecast: MemoryForecast) -> dict[str, Any]:
    """What a choice is made for, as JSON."""
    settings = asdict(forecast)
    del settings["shape"], settings["micro_batch_size"], settings["main_bytes"]
    return {**forecast.shape.as_json(), **settings}


@dataclass(frozen=True)
class TrialResult:
    """Measurements of a trial."""

    peak_bytes: int
    """Memory of the fullest process."""
    seconds_per_step: float


def try_steps(plan: RunPlan, forecast: MemoryForecast) -> tuple[RunPlan, TrialResult]:
    """Train a few steps that leave nothing behind; return the plan, on a GPU with the micro batch for `auto`.

    Raises:
        RunError: they failed, or ran out of memory with a micro batch that the user chose or that is the smallest.
    """
    print(f"trying a few steps in {processes_text(plan)}", flush=True)
    if plan.given.micro_batch_size != "auto" or forecast.device == "cpu":
        size, result = plan.config.micro_batch, _tried(plan)
    else:
        size, result = _largest_on_gpu(plan, forecast)
    if result is None:
        raise _failed(launcher.OUT_OF_MEMORY)
    return with_micro_batch(plan, size), result


def _largest_on_gpu(plan: RunPlan, forecast: MemoryForecast) -> tuple[int, TrialResult | None]:
    """Find the largest micro batch that fits, from the measured peaks of small ones."""
    limit_bytes, sequence_bytes = forecast.peak_limit_bytes, min_activation_bytes(replace(forecast, micro_batch_size=1))
    results: dict[int, TrialResult | None] = {}
    while True:
        peaks = {size: result.peak_bytes if result else None for size, result in results.items()}
        size = choose_micro_batch(peaks, forecast.micro_batch_sizes, limit_bytes, sequence_bytes)
        if size in results:
            return size, results[size]
        print(f"micro_batch_size: auto: trying {size}", flush=True)
        results[size] = result = _tried(with_micro_batch(plan, size))
        fits = result is not None and result.peak_bytes <= limit_bytes
        held = "ran out of memory" if result is None else f"held {bytes_text(result.peak_bytes)}"
        print(f"micro_batch_size: auto: {size} {'fits' if fits else 'does not fit'}: a process {held}", flush=True)


def choose_micro_batch(
    peaks: Mapping[int, int | None], sizes: Sequence[int], limit_bytes: float, min_sequence_bytes: int = 0
) -> int:
    """Return the size to try next; one that was tried already is the choice.

    `peaks` are the measured bytes of each size that was tried, None where it ran out of memory; `sizes` those that
    divide the batch; `limit_bytes` is what may be used. The two smallest are tried first: the difference is what a
    sequence takes (at least `min_sequence_bytes`: with few, the update may set the peak). The largest that fits by that
    is tried next, and half of it where it does not. A choice that ran out of memory is the smallest: nothing fits.

    Example: 10 GB with 1 sequence and 11 GB with 2 of at most 256, within 80 GB: 64 is next. If that takes 72 GB, it
    is the choice; if it runs out of memory, 32 is next.
    """
    sizes = sorted(sizes)
    failed = min((size for size, peak in peaks.items() if peak is None or peak > limit_bytes), default=math.inf)
    if untried := [size for size in sizes[:2] if size not in peaks and size < failed]:
        return untried[0]
    fitting = sorted((size, peak) for size, peak in peaks.items() if peak is not None and size < failed)
    if not fitting:
        return sizes[0]
    (smaller, lower), (largest, peak) = fitting[-2:] if len(fitting) > 1 else (fitting[0], fitting[0])
    measured = (peak - lower) / (largest - smaller) if largest > smaller else 0
    of_sequence = max(measured, min_sequence_bytes, 1)
    reach = min(largest + (limit_bytes - peak) / of_sequence, failed / 2)
    return max([largest, *(size for size in sizes if size <= reach)])


def _tried(plan: RunPlan) -> TrialResult | None:
    """Run a trial; None where a process ran out of memory."""
    with tempfile.TemporaryDirectory(prefix="zerokara-trial-") as folder:
        path = Path(folder, "result.json")
        code = spawn(plan, "trial", str(path))
        if code and code != launcher.OUT_OF_MEMORY:
            raise _failed(code)
        return None if code else TrialResult(**orjson.loads(path.read_bytes()))


def _failed(code: int) -> RunError:
    return RunError(f"the trial ended with exit code {code}; the messages above say why. Nothing was written")
