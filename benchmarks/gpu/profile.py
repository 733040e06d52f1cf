"""A lone training process of step 3, of which two steps are profiled; then it ends, and saves nothing.

    python -m benchmarks.gpu.profile OPTIONS OF STEP 3

What the launcher would start, in this process. It prints two JSON objects, on a line each: at first what the plan
foretells, so that it is known also of a run that fails; and before the last step, with which a run would end, what
torch.profiler saw of the two steps before it: kernels and parts of a step by time. The device is waited for before and
after them, so that whole steps with their edges are seen. How long a step takes is told by those before. On a CPU
operators take the place of kernels.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu.jobs import WARM_UP_STEPS
from zerokara.base.resources import network_environment
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import language_model
from zerokara.training import loop, spawning, worker
from zerokara.training.compute import engine_choice
from zerokara.training.guards import StepRecord
from zerokara.training.planning import processors, run_folder
from zerokara.training.planning.run_plan import PLAN_NAME, RunPlan, make_plan

NUM_STEPS = 2
NUM_KERNELS = 15
"""Of the report; all others are one line."""
LOSS, UPDATE = "loss", "update"
"""Parts that are known by where they are computed, whatever their kernels are."""
ATTENTION = ("attention", "flash", "fmha", "sdpa", "varlen")
NAMES = {
    "attention": ATTENTION,
    "products": ("gemm", "gemv", "nvjet", "cutlass", "splitk", "triton_tem", "::mm", "::bmm", "addmm", "scaled_mm"),
    "exchange": ("nccl", "c10d", "gloo"),
}
"""Parts that are known by the names of their kernels; all others are element-wise: copies, norms, what is compiled."""


def main() -> None:
    """Command line."""
    settings = [value for option, value in itertools.pairwise(sys.argv[1:]) if option == "--set"]
    config = load(PretrainConfig, "/dev/null", settings)
    devices = processors.devices()
    plan = replace(make_plan(config).on_processes(1), devices=devices)
    plan = plan.with_settings(precision=devices.precision(config))
    print(json.dumps(foretold(plan, config)), flush=True)
    run_folder.claim(plan)
    on_gpu = torch.cuda.is_available()
    os.environ.update(network_environment() | ({} if on_gpu else {"DS_ACCELERATOR": "cpu"}))
    seen = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])
    train_step, begun = loop.train_step, list[float]()
    first = config.max_steps - NUM_STEPS

    def profiled(engine: Any, processes: Any, loader: Any, step: int, *others: Any) -> StepRecord:
        if step == first:
            wait()
            begun.append(time.perf_counter())
            engine.update = named(UPDATE, engine.update)
            language_model.cross_entropy = named(LOSS, language_model.cross_entropy)
            seen.start()
        elif step == config.max_steps:
            wait()
            seen.stop()
            report = {"first_step": first, **summary(seen.events() or (), usual_seconds(begun))}
            print(json.dumps({"profile": report}), flush=True)
            os._exit(0)
        else:
            begun.append(time.perf_counter())
        return train_step(engine, processes, loader, step, *others)

    loop.train_step = profiled
    with spawning.local_rendezvous() as variables:
        os.environ.update(variables | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
        sys.exit(worker.main([str(plan.run_dir / PLAN_NAME), "train"]))


def foretold(plan: RunPlan, config: PretrainConfig) -> dict[str, Any]:
    """Device, versions, engine, parameters, and the memory where the run computes, at least and amply."""
    pool, on_gpu = plan.memory.pools[0], torch.cuda.is_available()
    uncounted = sum(plan.memory.uncounted.values()) if on_gpu else 0  # memory_bytes is torch's own
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "megatron-core")},
        "engine": next(engine_choice.plan_lines(config, 1, plan.template)),
        "parameters": plan.shape.num_parameters(),
        "batch": f"{config.global_batch_size // config.micro_batch} × {config.micro_batch} × {config.seq_len}",
        "precision": plan.resolved.precision,
        "least_bytes": pool.least_bytes - uncounted,
        "ample_bytes": pool.needed_bytes - uncounted,
    }


def wait() -> None:
    """Until the device has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its span in the profile; the profiler puts it around its kernels on the device as well."""

    def call(*arguments: Any, **options: Any) -> Any:
        with record_function(name):
            return function(*arguments, **options)

    return call


def usual_seconds(begun: list[float]) -> float:
    """A step's seconds without the profiler: the median of those after the warm-up, from when each one began."""
    took = [after - before for before, after in itertools.pairwise(begun)]
    return statistics.median(took[WARM_UP_STEPS:])


def summary(events: Iterable[Any], step_seconds: float) -> dict[str, Any]:
    """The report of `NUM_STEPS` steps, which take so many seconds each without a profiler; times in ms a step."""
    kind = DeviceType.CUDA if torch.cuda.is_available() else DeviceType.CPU
    events = [event for event in events if event.device_type == kind]
    marked = [(event.name, event.time_range) for event in events if event.name in (LOSS, UPDATE)]
    spans, times, parts = [], Counter[str](), Counter[str]()
    for event in events:
        if event.is_user_annotation or event.name in (LOSS, UPDATE):  # a span of the program's, and no kernel
            continue
        begin, end = event.time_range.start, event.time_range.end
        spans.append((begin, end))
        took = end - begin if kind == DeviceType.CUDA else event.self_cpu_time_total
        times[event.name] += took
        inside = (name for name, span in marked if span.start <= begin < span.end)
        parts[next(inside, None) or part_of(event.name)] += took
    shown = times.most_common(NUM_KERNELS)
    others = times.total() - sum(microseconds for _, microseconds in shown)
    kernels = [(name[:160], microseconds) for name, microseconds in [*shown, ("all others", others)]]
    a_step = 1000 * NUM_STEPS
    waiting = max(0.0, 1000 * step_seconds - covered(spans) / a_step)
    return {
        "step_seconds": step_seconds,
        "idle": waiting / 1000 / step_seconds,
        "parts": {name: took / a_step for name, took in parts.most_common()} | {"waiting": waiting},
        "kernels": [[name, microseconds / a_step] for name, microseconds in kernels],
        "attention": sorted({name[:160] for name in times if any(word in name.lower() for word in ATTENTION)}),
    }


def part_of(kernel: str) -> str:
    """The part of a step to which a kernel belongs by its name.

    Inductor names a kernel after all that it fuses, casts before a product among it: only a template's is a product.
    """
    if kernel.startswith("triton_") and not kernel.startswith("triton_tem"):
        return "element-wise"
    parts = (part for part, words in NAMES.items() if any(word in kernel.lower() for word in words))
    return next(parts, "element-wise")


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals: kernels of several streams overlap."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length


if __name__ == "__main__":
    main()
