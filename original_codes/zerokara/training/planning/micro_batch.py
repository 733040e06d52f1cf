"""What `micro_batch_size: auto` is: chosen once for a run on a machine, and kept in the run folder.

On a GPU the largest that fits, found by trials whose peak memory is measured. On a CPU as many tokens as make it
fastest. A micro batch of another size adds the same numbers up in another order, so the choice is written down with all
that it was made for, and made again only when some of that has changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from zerokara.durable import write_json
from zerokara.training.planning import setting_names
from zerokara.training.planning.memory_forecast import MemoryForecast

CPU_TOKENS = 2048
"""On a CPU no size is larger than the first with so many tokens: a larger matrix product is no faster. Measured."""
FILE_NAME = "machine.json"


def first_choice(forecast: MemoryForecast) -> int:
    """The largest size that almost certainly fits, on a CPU no larger than is faster; 1 where none does."""
    sizes = forecast.layout.micro_batch_sizes
    if forecast.machine.gpu_bytes is None:
        enough = [size for size in sizes if size * forecast.layout.shape.input_len >= CPU_TOKENS]
        sizes = [size for size in sizes if not enough or size <= enough[0]]
    return next((size for size in reversed(sizes) if forecast.changed(micro_batch_size=size).fits), 1)


def choose_micro_batch(
    peaks: Mapping[int, int | None], sizes: Sequence[int], limit_bytes: float, min_sequence_bytes: int = 0
) -> int:
    """The size to try next; one that was tried already is the choice.

    `peaks` are the measured bytes of each size that was tried, None where it ran out of memory; `sizes` those that
    divide the batch (`TrainingLayout.micro_batch_sizes`); `limit_bytes` is what may be used
    (`MemoryForecast.peak_limit_bytes`). The two smallest are tried first: the difference is what a sequence takes (at
    least `min_sequence_bytes`, `min_activation_bytes` of one: with few, the update may set the peak). The largest that
    fits by that is tried next, and half of it where it does not. A choice that ran out of memory is the smallest:
    nothing fits.

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


@dataclass(frozen=True)
class MicroBatchChoice:
    """A choice, and all that it was made for, except how busy the machine was at the moment."""

    micro_batch_size: int
    chosen_for: dict[str, Any]

    @classmethod
    def of(cls, forecast: MemoryForecast, micro_batch_size: int) -> MicroBatchChoice:
        """A choice for this layout on this machine."""
        settings = asdict(forecast.layout)
        del settings["shape"], settings["micro_batch_size"]
        gpu = {} if forecast.machine.gpu_bytes is None else {"gpu_bytes": forecast.machine.gpu_bytes}
        return cls(micro_batch_size, {**forecast.layout.shape.as_json(), **settings, **gpu})

    @classmethod
    def read(cls, run_dir: Path) -> MicroBatchChoice | None:
        """The choice of this run's last start with `auto`; None where there is none."""
        path = run_dir / FILE_NAME
        return cls(**orjson.loads(path.read_bytes())) if path.exists() else None

    def write(self, run_dir: Path) -> None:
        """Keep the choice for the next start."""
        write_json(run_dir / FILE_NAME, asdict(self))

    def holds_for(self, forecast: MemoryForecast) -> bool:
        """Whether it was made for this layout on this machine."""
        return self.chosen_for == MicroBatchChoice.of(forecast, self.micro_batch_size).chosen_for

    def changes_to(self, now: MicroBatchChoice) -> list[str]:
        """A line for the plan where the choice differs, with the reason."""
        if now.micro_batch_size == self.micro_batch_size:
            return []
        why = "; ".join(setting_names.differences(self.chosen_for, now.chosen_for))
        was, is_now = self.micro_batch_size, now.micro_batch_size
        return [f"micro_batch_size: auto was {was}, is now {is_now} ({why}): the same sums in another order"]
