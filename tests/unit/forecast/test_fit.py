"""The law, and the small runs that it is fitted on; real runs are those of tests/pipeline."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil
import pytest
from configs import config_of, fault_of

from zerokara.base.durable import write_file, write_json
from zerokara.base.errors import RunError, UserError
from zerokara.forecast import fit as module
from zerokara.forecast.fit import CalibrationRun, MeasuredRun, SmallRuns, fit, plan_runs, slots
from zerokara.forecast.sizes import Planner, Speed
from zerokara.model.shapes import ModelShape

PARAMETERS, LENGTHS = (0.4e6, 1e6, 3e6), (4e6, 12e6, 40e6)


def truth(parameters: float, tokens: float) -> float:
    """A law of the usual form, other than the prior's exponents, in bits per byte."""
    return 0.62 + 0.55 * (parameters / 1e6) ** -0.31 + 0.42 * (tokens / 1e7) ** -0.42


def bottleneck(parameters: float, tokens: float) -> float:
    """A law in which the worse of the two terms decides."""
    return 0.55 + (0.45 * (parameters / 1e6) ** (-0.3 / 0.2) + 0.6 * (tokens / 1e7) ** (-0.25 / 0.2)) ** 0.2


def runs(noise: float, seed: int = 0, of: Callable[[float, float], float] = truth) -> list[MeasuredRun]:
    chance, sizes = np.random.default_rng(seed), itertools.product(PARAMETERS, LENGTHS)
    return [MeasuredRun(*each, of(*each) * chance.normal(1, noise)) for each in sizes]


@pytest.mark.parametrize("law_of", [truth, bottleneck])
def test_a_law_is_found_again(law_of: Callable[[float, float], float]) -> None:
    law = fit(runs(noise=0, of=law_of))
    for size in (*PARAMETERS, 12e6):
        for length in (*LENGTHS, 160e6):
            assert law.predict(size, length).value == pytest.approx(law_of(size, length), rel=0.01)
    assert law.noise == pytest.approx(0.003)
    # What a larger model gains with each length: in a sum of two terms the same, where the worse decides ever more.
    gains = [law_of(0.4e6, length) - law_of(3e6, length) for length in LENGTHS]
    assert (gains[-1] > 2 * gains[0]) == (law_of is bottleneck)
    found = [law.predict(0.4e6, length).value - law.predict(3e6, length).value for length in LENGTHS]
    assert found == pytest.approx(gains, rel=0.05)


def test_four_times_as_large_is_told_within_three_percent_and_the_interval_holds_it() -> None:
    """In noisy runs, whatever the noise; about one in twenty lies outside of its interval."""
    held = []
    for seed in range(10):
        predicted = fit(runs(noise=0.005, seed=seed)).predict(12e6, 160e6)
        assert predicted.value == pytest.approx(truth(12e6, 160e6), rel=0.06)
        assert predicted.low < predicted.value < predicted.high
        held.append(predicted.low <= truth(12e6, 160e6) <= predicted.high)
    assert sum(held) >= 8


def test_more_of_anything_never_costs_bits() -> None:
    law = fit(runs(noise=0.02, seed=3))
    values = [law.predict(size, 1e7).value for size in (1e5, 1e6, 1e7, 1e9)]
    assert values == sorted(values, reverse=True)
    values = [law.predict(1e6, length).value for length in (1e6, 1e7, 1e8, 1e12)]
    assert values == sorted(values, reverse=True)
    near, far = (law.predict(*place) for place in ((2e6, 2e7), (1e9, 2e10)))  # further away less is known
    assert (far.high - far.low) / far.value > 2 * (near.high - near.low) / near.value


SHAPES = [ModelShape.from_config(config_of(seq_len=256, **each), 4000) for each in module.SHAPES]
SPEED = Speed(1e-5, 1e-11)


def planned(minutes: float, unique_tokens: int = 10**12, num_slots: int = 1) -> list[CalibrationRun]:
    return plan_runs(SHAPES, SPEED, minutes, num_slots, unique_tokens, eval_tokens=50_000)


@pytest.mark.parametrize("minutes", [15, 30, 120, 1000])
def test_the_runs_take_the_time_that_there_is(minutes: float) -> None:
    for num_slots in (1, 9):
        found = planned(minutes, num_slots=num_slots)
        seconds = [run.seconds(SPEED) for run in found]
        assert (sum(seconds) if num_slots == 1 else max(seconds)) == pytest.approx(minutes * 60, rel=0.01)
        assert len(found) == 9
        assert len({run.shape.hidden_size for run in found}) == len({run.tokens for run in found}) == 3


def test_more_time_makes_the_runs_longer_and_the_sizes_larger() -> None:
    plans = [planned(minutes) for minutes in (15, 30, 120, 1000)]
    widths = [max(run.shape.hidden_size for run in found) for found in plans]
    assert widths == sorted(widths) and widths[0] < widths[-1]
    longest = max(plans[-1], key=lambda run: run.tokens * run.shape.hidden_size)
    assert longest.tokens >= module.MIN_TOKENS_PER_PARAMETER * longest.shape.num_parameters()


def test_too_little_time_or_text_for_any() -> None:
    assert max(run.tokens for run in planned(60, unique_tokens=2_000_000)) <= 2e6  # no token is read twice
    least = float(fault_of(planned, 1).remedy.removeprefix("give "))
    assert planned(least)
    with pytest.raises(UserError, match="too short"):
        planned(0.8 * least)
    with pytest.raises(UserError, match="training tokens"):
        planned(60, unique_tokens=1000)


@pytest.mark.parametrize(
    ("most", "num_cores", "memory", "num_gpus", "expected"),
    [
        (9, 8, 100e9, 0, 8),
        (3, 8, 100e9, 0, 3),
        (9, 8, 5e9, 0, 3),
        (9, 2, 1e9, 0, 1),
        (9, 8, 100e9, 2, 2),
    ],
)
def test_cores_and_gpus_are_shared_out(
    monkeypatch: pytest.MonkeyPatch, most: int, num_cores: int, memory: float, num_gpus: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(module, "available_cores", lambda: num_cores)
    monkeypatch.setattr(module, "available_memory", lambda: memory)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = slots(most, num_gpus)
    assert [slot.gpu for slot in found] == (["0", "1"] if num_gpus else [None] * expected)
    assert sorted(core for slot in found for core in slot.cores) == list(range(num_cores))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-1b")
    assert not num_gpus or [slot.gpu for slot in slots(most, num_gpus)] == ["5", "GPU-1b"]


def test_one_that_fails_ends_the_others_and_none_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, started = SmallRuns(Planner(tmp_path / "none.yaml", ()), tmp_path), list[subprocess.Popen[bytes]]()
    small.__dict__["folder"] = tmp_path / "runs"  # else it asks for a plan

    def start(self: SmallRuns, *_: object) -> subprocess.Popen[bytes]:
        program = "raise SystemExit(3)" if started else "import time; time.sleep(60)"
        started.append(subprocess.Popen([sys.executable, "-S", "-c", program]))
        return started[-1]

    monkeypatch.setattr(SmallRuns, "_start", start)
    with pytest.raises(RunError, match="exit code 3"):
        small.train(planned(60), SPEED, slots(2, 0) * 2)
    sleeper, *failing = (program.returncode for program in started)
    assert sleeper == -15 and 3 in failing and len(started) <= 4  # whichever failed first


def test_the_speed_is_measured_once_for_the_runs_stay_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each start another speed would give the runs other lengths, and none would go on."""
    measured = iter([(1.0, 1.0), (2.0, 3.0)])
    monkeypatch.setattr(Planner, "measure", lambda *_: next(measured))
    small = SmallRuns(Planner(tmp_path / "none.yaml", ()), tmp_path)
    small.__dict__.update(folder=tmp_path / "runs", settings={})
    (slot,) = slots(1, 0)
    first = small.measure_speed(slot)
    assert first == small.measure_speed(slot) and first.seconds_per_flop == 1.5
    assert small.results(1000) == []


def test_results_are_those_of_one_validation_text(tmp_path: Path) -> None:
    small = SmallRuns(Planner(tmp_path / "none.yaml", ()), tmp_path)
    small.__dict__["folder"] = tmp_path
    for number, eval_tokens in enumerate((1000, 50_000, 50_000)):
        write_json(tmp_path / f"width64_tokens{number}_validation{eval_tokens}.json", asdict(MeasuredRun(1, number, 2)))
    assert [run.tokens for run in small.results(50_000)] == [1, 2]


def test_a_small_run_is_measured_at_its_end(tmp_path: Path) -> None:
    small = SmallRuns(Planner(tmp_path / "none.yaml", ()), tmp_path)
    small.__dict__["folder"] = tmp_path
    run = planned(60)[0]
    folder = small.result_path(run).with_suffix("")
    lines = [{"step": 0, "valid_bits_per_byte": 4.0}, {"step": 2, "tokens": 64, "valid_bits_per_byte": 2.0}]
    write_file(folder / "metrics.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))
    small._finish(run, 0)
    (found,) = small.results(run.eval_tokens)
    assert (found.tokens, found.bits_per_byte) == (64, 2.0) and not folder.exists()


def test_a_small_run_ends_with_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would go on beside the next plan, which measures this machine, and is refused its folder."""
    program = f"""
import os, signal, sys, time
from pathlib import Path
from zerokara.forecast import fit
sys.executable = {str(tmp_path / "sleeper")!r}
small = fit.SmallRuns.__new__(fit.SmallRuns)
folder = Path({str(tmp_path)!r})
small.__dict__.update(folder=folder, settings={{}}, planner=fit.Planner(folder / "config.yaml", ()))
run = fit.CalibrationRun({{}}, type("Shape", (), {{"hidden_size": 1, "raw_len": 64}}), 1, 1)
print(small._start(run, fit.slots(1, 0)[0]).pid, flush=True)
time.sleep(60)
"""
    (tmp_path / "config.yaml").touch()
    (tmp_path / "sleeper").write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    (tmp_path / "sleeper").chmod(0o755)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, encoding="utf-8") as plan:
        assert plan.stdout is not None
        small_run = psutil.Process(int(plan.stdout.readline()))
        plan.kill()
    small_run.wait(10)


def test_a_file_that_is_edited_meanwhile_ends_the_plan(tmp_path: Path) -> None:
    """Else its small runs would be of two kinds of model, and in one law."""
    path = tmp_path / "config.yaml"
    path.write_text("seq_len: 64\n", encoding="utf-8")
    planner = Planner(path, ())
    assert planner.config(lr=0.1).seq_len == 64
    path.write_text("seq_len: 64\narchitecture: gpt2\n", encoding="utf-8")
    with pytest.raises(RunError, match="has changed since this command began"):
        planner.config()
