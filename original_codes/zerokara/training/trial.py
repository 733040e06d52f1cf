"""A trial before a run that costs days: the real processes train a few steps of the real model on the real data.

For ``--dry-run``, and for ``micro_batch_size: auto`` on a GPU. What the steps learn is thrown away, and nothing is
written. They tell the speed, the kernels, and the memory at its peak, which no arithmetic foresees.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
import torch.distributed
from torch.profiler import ProfilerActivity, profile

from zerokara import resources
from zerokara.durable import write_json
from zerokara.errors import RunError
from zerokara.model import compilation
from zerokara.model.blocked_attention import BlockedAttention
from zerokara.progress import count_text, seconds_text
from zerokara.training.guards import StepGuard
from zerokara.training.loop import StepRecord, train_step
from zerokara.training.micro_batch import TrialResult
from zerokara.training.planning.memory import MemoryForecast
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.processes.joining import gpu_memory, peak_memory
from zerokara.training.run import Run, join, open_run

MIN_STEPS, MAX_STEPS = 3, 33
MEASURED_SECONDS = 3.0
"""For so long, or for MAX_STEPS, steps are measured. The first is slow (memory is taken, kernels are chosen, its
operators are listed) and does not count; of the others the median does, as the next few may still be slow."""
_NO_LOG = "6"
"""Of the levels that torch's profiler reads when it is first used: 5, USDT, logs its start and its end (torch 2.13)."""
_PLAIN = "aten::_scaled_dot_product_attention_math"
ATTENTION_KERNELS = {
    "aten::_scaled_dot_product_flash_attention": "FlashAttention",
    "aten::_scaled_dot_product_cudnn_attention": "cuDNN",
    "aten::_scaled_dot_product_efficient_attention": "the memory-efficient kernel",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "torch's flash kernel for CPUs",
    "torch_attn::_varlen_attn": "FlashAttention over sequences of any lengths",
}
"""What `scaled_dot_product_attention` and `varlen_attn` call, in eager and in compiled layers (torch 2.13,
aten/src/ATen/native/transformers/attention.cpp and torch/nn/attention/varlen.py)."""
_OWN_KERNELS = {BlockedAttention.__name__: "matrix products of blocks of queries"}


def run_trial(plan: RunPlan, result_path: Path) -> None:
    """Train a few steps in this process and the others, log speed and memory, write nothing but the result.

    Raises:
        RunError: a process did not answer, or a loss was not finite.
    """
    processes = join(plan)
    gpu_bytes = gpu_memory(processes.device)
    forecast = plan.memory_forecast(resources.available_memory(plan.processes_per_node), gpu_bytes)
    run = open_run(plan, processes)
    _log_result(run, _steps(run), forecast, result_path)


def _steps(run: Run) -> list[StepRecord]:
    """Train for MEASURED_SECONDS; every process the same steps."""
    plan = run.plan
    guard, records = StepGuard(plan.config.spike_sigmas, plan.config.max_skipped_steps), []
    last_step = max(MIN_STEPS, min(MAX_STEPS, plan.schedule.num_steps))
    with closing(run.loader(last_step)) as loader:
        for step in range(1, last_step + 1):
            torch.distributed.barrier()
            learning_rate = plan.schedule.learning_rate(min(step, plan.schedule.num_steps))
            profiled = first_forward_profiled(run.model) if step == 1 else nullcontext(set[str]())
            with profiled as seen:
                record = train_step(run.engine, run.processes, loader.take, step, learning_rate, guard, lambda: False)
            if step == 1:
                _log_kernels(run, seen)
            if record.skip_reason:
                raise RunError(f"trial step {step}: {record.skip_reason}: see lr, precision and the data")
            records.append(record)
            measured = run.processes.max(sum(each.seconds for each in records[1:]))
            if step >= MIN_STEPS and measured >= MEASURED_SECONDS:
                break
    return records


def _log_kernels(run: Run, seen: Collection[str]) -> None:
    config = run.plan.config
    optimizer = {"adamw": "torch's fused AdamW", "adafactor": "Adafactor", "muon": "Muon, and torch's fused AdamW"}
    reason = compilation.reason_against(config.compile, run.processes.device.type, config.zero_stage)
    compiled = f"; layers not compiled ({reason})" if reason else ""
    run.processes.log(f"kernels: {attention_kernels(seen)}; {optimizer[config.optimizer_name]}{compiled}")


@contextmanager
def first_forward_profiled(model: torch.nn.Module) -> Iterator[set[str]]:
    """Profile the next forward pass of `model`; yields a set that then holds the names of its operators.

    In what order torch asks its attention kernels is its own affair, and differs by release and GPU: so nothing is
    asked, only seen, in the very pass that trains.
    """
    names: set[str] = set()
    os.environ.setdefault("KINETO_LOG_LEVEL", _NO_LOG)
    seen = profile(activities=[ProfilerActivity.CPU])

    def begin(*_: object) -> None:
        before.remove()
        seen.__enter__()

    def end(*_: object) -> None:
        after.remove()
        seen.__exit__(None, None, None)
        names.update(event.name for event in seen.events())

    before, after = model.register_forward_pre_hook(begin), model.register_forward_hook(end)
    try:
        yield names
    finally:
        before.remove()
        after.remove()


def attention_kernels(operators: Collection[str]) -> str:
    """Name what computes the attention, by the operators of a forward pass."""
    fused = [kernel for name, kernel in {**ATTENTION_KERNELS, **_OWN_KERNELS}.items() if name in operators]
    plain = "plain operations, slow and with the matrix of all scores"
    if _PLAIN in operators:
        fused.append(plain)
    return f"attention by {' and by '.join(fused) or plain}"


def _log_result(run: Run, records: Sequence[StepRecord], forecast: MemoryForecast, path: Path) -> None:
    processes, schedule = run.processes, run.plan.schedule
    seconds = median(record.seconds for record in records[1:])
    peak = processes.max(peak_memory(processes.device))
    speed = f"{seconds_text(seconds)} a step, {count_text(schedule.batch_tokens / seconds)} tok/s"
    processes.log(
        f"trial of {len(records)} steps: loss {records[-1].loss:.3f}, {speed}; "
        f"all {schedule.num_steps:,} steps would take {seconds_text(schedule.num_steps * seconds)}, validations and "
        "saves not counted"
    )
    processes.log(f"memory: {forecast.measured_text(int(peak))}")
    if processes.is_first:
        write_json(path, asdict(TrialResult(int(peak), seconds)))
