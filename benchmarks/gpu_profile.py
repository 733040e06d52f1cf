"""A lone training process of step 3, whose steps 4 and 5 are profiled; then it ends, and saves nothing.

    python benchmarks/gpu_profile.py REPORT.json OPTIONS OF STEP 3

What the launcher would start, in this process, with one change: before step 4 and before step 6 the device is waited
for, and torch.profiler runs between. So two whole steps with their edges are seen. The report, as JSON: seconds a step
under the profiler, the share of it in which the device computed nothing, and the kernels by time. On a CPU operators
take the place of kernels.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "original_codes"))

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import loopback
from zerokara.training import launching, loop, worker
from zerokara.training.guards import StepRecord
from zerokara.training.planning import processors, run_folder
from zerokara.training.planning.run_plan import PLAN_NAME, make_plan

FIRST_STEP, NUM_STEPS = 4, 2
NUM_KERNELS = 15
"""Of the report; all others are one line."""
ATTENTION = ("attention", "flash", "fmha", "sdpa")


def main() -> None:
    """Command line."""
    report, options = Path(sys.argv[1]), sys.argv[2:]
    settings = [value for option, value in itertools.pairwise(options) if option == "--set"]
    config = load(PretrainConfig, "/dev/null", settings)
    plan = make_plan(config, 1).with_settings(precision=processors.devices().precision(config))
    run_folder.claim(plan)
    on_gpu = torch.cuda.is_available()
    os.environ.update(loopback.environment() | ({} if on_gpu else {"DS_ACCELERATOR": "cpu"}))
    seen = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
    train_step, begun = loop.train_step, [0.0]

    def profiled(engine: Any, processes: Any, loader: Any, step: int, *others: Any) -> StepRecord:
        if step == FIRST_STEP:
            wait()
            seen.start()
            begun[0] = time.perf_counter()
        elif step == FIRST_STEP + NUM_STEPS:
            wait()
            seconds = time.perf_counter() - begun[0]
            seen.stop()
            report.write_text(json.dumps(summary(seen, seconds)), encoding="utf-8")
            print("profiled", flush=True)
            os._exit(0)
        return train_step(engine, processes, loader, step, *others)

    loop.train_step = profiled
    with launching.rendezvous() as variables:
        os.environ.update(variables | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
        sys.exit(worker.main([str(plan.run_dir / PLAN_NAME), "train"]))


def wait() -> None:
    """Until the device has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def summary(seen: profile, seconds: float) -> dict[str, Any]:
    """The report of `NUM_STEPS` steps that took so many seconds."""
    kind = DeviceType.CUDA if torch.cuda.is_available() else DeviceType.CPU
    spans, times = [], Counter[str]()
    for event in seen.events() or ():
        if event.device_type == kind and not event.is_user_annotation:  # that is a span of the program's, and no kernel
            spans.append((event.time_range.start, event.time_range.end))
            on_device = event.time_range.elapsed_us()
            times[event.name] += on_device if kind == DeviceType.CUDA else event.self_cpu_time_total
    shown = times.most_common(NUM_KERNELS)
    others = times.total() - sum(microseconds for _, microseconds in shown)
    kernels = [(name[:160], microseconds) for name, microseconds in [*shown, ("all others", others)]]
    return {
        "step_seconds": seconds / NUM_STEPS,
        "idle": max(0.0, 1 - covered(spans) / 1e6 / seconds),
        "kernels": [[name, microseconds / 1000 / NUM_STEPS] for name, microseconds in kernels],
        "attention": sorted({name[:160] for name in times if any(word in name.lower() for word in ATTENTION)}),
    }


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals: kernels of several streams overlap."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length


if __name__ == "__main__":
    main()
