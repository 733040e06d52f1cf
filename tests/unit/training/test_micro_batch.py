"""`micro_batch_size: auto`: the size that is chosen, from measured peaks on a GPU, and that a run keeps it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zerokara.model.shapes import ModelShape
from zerokara.training.planning.memory import TrainingLayout
from zerokara.training.planning.memory_forecast import MachineMemory, MemoryForecast
from zerokara.training.planning.micro_batch import CPU_TOKENS, MicroBatchChoice, choose_micro_batch, first_choice

GB = 10**9
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def forecast_of(gpu: float | None = 80, seq_len: int = 2048, **settings: Any) -> MemoryForecast:
    shape = ModelShape("llama", 2, 64, 4, 4, 192, seq_len, 500, True, 1e4, 1e-5, 0.02)
    machine = MachineMemory(None if gpu is None else int(gpu * GB), 64 * GB)
    given = {"num_processes": 1, "global_batch_size": 256, "micro_batch_size": 1, "precision": "fp32", **settings}
    return MemoryForecast(TrainingLayout(shape, machine.device, **given), machine)


def trials(peak_of: Callable[[int], float], sizes: list[int] = SIZES, min_sequence: float = 0) -> list[int]:
    """The sizes that are tried one after another, and the choice at the end; peaks in GB, of 100, of which 80 may be
    used."""
    peaks: dict[int, int | None] = {}
    while (size := choose_micro_batch(peaks, sizes, 80 * GB, int(min_sequence * GB))) not in peaks:
        peaks[size] = int(peak_of(size) * GB) if peak_of(size) <= 100 else None
    return [*peaks, size]


def test_the_largest_that_fits_is_found_by_extrapolation_and_confirmed() -> None:
    assert trials(lambda size: 10 + size) == [1, 2, 64, 64]
    assert trials(lambda size: 10 + 0.1 * size) == [1, 2, 256, 256]
    assert trials(lambda size: 60 + 15 * size) == [1, 2, 1], "two are too many, one was measured"


def test_a_size_that_runs_out_of_memory_is_halved() -> None:
    # The update sets the peak of few sequences: they seem to cost nothing.
    assert trials(lambda size: max(50, 2 * size)) == [1, 2, 256, 128, 64, 32, 32]
    assert trials(lambda size: max(50, 2 * size), min_sequence=1) == [1, 2, 32, 32]


def test_a_peak_beyond_the_limit_does_not_count_as_fitting() -> None:
    assert trials(lambda size: 10 + size + size**2 / 100) == [1, 2, 64, 32, 32]


def test_sizes_need_not_be_powers_of_two() -> None:
    assert trials(lambda size: 10 + 4 * size, sizes=[1, 3, 5, 15]) == [1, 3, 15, 15]
    assert trials(lambda size: 10 + 6 * size, sizes=[1, 3, 5, 15]) == [1, 3, 5, 5]
    assert trials(lambda size: 10 + 6 * size, sizes=[1]) == [1, 1]


def test_where_not_even_one_sequence_fits_it_stays_the_choice() -> None:
    assert trials(lambda size: math.inf) == [1, 1]


def test_the_first_choice_is_the_largest_that_surely_fits_on_a_gpu() -> None:
    tight, roomy = forecast_of(gpu=2), forecast_of(gpu=8)
    chosen = first_choice(tight)
    assert tight.changed(micro_batch_size=chosen).fits and not tight.changed(micro_batch_size=2 * chosen).fits
    assert first_choice(roomy) > chosen and 256 % chosen == 0
    assert first_choice(forecast_of(gpu=0.1)) == 1


@pytest.mark.parametrize("seq_len", [128, 2048, 8192])
def test_auto_on_a_cpu_stops_where_it_gets_no_faster(seq_len: int) -> None:
    assert first_choice(forecast_of(None, seq_len)) * seq_len == max(CPU_TOKENS, seq_len)


def test_auto_on_a_cpu_takes_all_where_that_is_little() -> None:
    assert first_choice(forecast_of(None, 16, global_batch_size=24, num_processes=2)) == 12


def test_a_choice_is_kept_until_what_it_was_made_for_changes(tmp_path: Path) -> None:
    forecast = forecast_of()
    assert MicroBatchChoice.read(tmp_path) is None
    MicroBatchChoice.of(forecast, 16).write(tmp_path)
    kept = MicroBatchChoice.read(tmp_path)
    assert kept is not None and kept.micro_batch_size == 16
    assert kept.holds_for(replace(forecast, machine=MachineMemory(80 * GB, GB))), "a busy machine is the same one"
    assert kept.holds_for(forecast.changed(micro_batch_size=8))
    smaller = replace(forecast, machine=MachineMemory(40 * GB, 64 * GB))
    assert not kept.holds_for(smaller) and not kept.holds_for(forecast.changed(zero_stage=2))
    assert kept.changes_to(MicroBatchChoice.of(smaller, 16)) == []
    (line,) = kept.changes_to(MicroBatchChoice.of(smaller, 8))
    assert "auto was 16, is now 8" in line and str(40 * GB) in line
