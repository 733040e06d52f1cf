"""A training process: ``python -m zerokara.training.worker PLAN WORK``, as the launching process starts it.

It reads the plan from its file and does its work. If it runs out of memory or loses the others, it says why.

One of its tasks is a trial before a run that takes days, for ``--dry-run`` and for ``micro_batch_size: auto`` on a GPU:
a few real steps, thrown away, tell the speed, the kernels, and the memory at its peak, which no arithmetic foresees.
"""

import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
import torch.distributed
from torch.profiler import ProfilerActivity, profile

from zerokara.base.durable import write_json
from zerokara.base.errors import RunError, guarded
from zerokara.base.progress import bytes_text, count_text, logging_in_background, seconds_text
from zerokara.base.resources import end_with_parent
from zerokara.model import compilation
from zerokara.training.guards import StepGuard
from zerokara.training.loop import Trainer, train_step
from zerokara.training.planning.memory import MemoryForecast, TrialResult
from zerokara.training.planning.processors import PARENT_NAME
from zerokara.training.planning.run_plan import PRETRAINING, RunPlan, RunTask, read_plan
from zerokara.training.processes import supervision
from zerokara.training.processes.joining import join, peak_memory
from zerokara.training.run import load_batches, open_run
from zerokara.training.validation import evaluate_checkpoint

_GLOO = ("gloo/transport", "gloo::", "Gloo")
"""Marks of gloo's errors, among them a lost connection."""

MIN_STEPS, MAX_STEPS = 3, 33
MEASURED_SECONDS = 3.0
"""Time for measured steps, of which the median counts. The first is slow, and left out."""
_NO_LOG = "6"
"""Level that torch's profiler reads when it is first used: 5, USDT, would log its start and its end (torch 2.13)."""
_KERNELS = re.compile(r"aten::_scaled_dot_product_(\w+)|torch_attn::_(varlen_attn)|zerokara::(blocked_attention)")
"""Operators that `scaled_dot_product_attention` and `varlen_attn` call, in eager and in compiled layers (torch 2.13,
aten/src/ATen/native/transformers/attention.cpp and torch/nn/attention/varlen.py), and our own
(`model.cpu_attention`). ``attention_math`` are plain operations."""

WORK: Mapping[str, Callable[..., None]] = {
    "train": lambda plan: Trainer(plan).train(),
    "prove": lambda plan, last_step: Trainer(plan, lambda *_: [], int(last_step)).train(),
    "trial": lambda plan, result_path: run_trial(plan, Path(result_path)),
    "evaluate": lambda plan, folder: evaluate_checkpoint(plan, Path(folder)),
}
"""Works of a training process by name; each takes the plan and the arguments after the name."""


def main(arguments: Sequence[str], task: RunTask = PRETRAINING, work: Mapping[str, Callable[..., None]] = WORK) -> int:
    """Do what `arguments` name: the file of a plan of `task`, a key of `work`, its arguments. Return the exit code."""
    if launcher := os.environ.get(PARENT_NAME):  # should it die, this process saves
        end_with_parent(int(launcher), signal.SIGTERM)
    path, name, *others = arguments

    def run() -> None:
        plan = read_plan(Path(path), task)
        # torch's agents go on where one machine is lost.
        number = int(os.environ["WORLD_SIZE"])
        if number != plan.num_processes:
            plan = plan.on_processes(number, number // plan.processes_per_node)
            share = plan.resolved.global_batch // plan.data_parallel_size
            plan = plan.with_settings(micro_batch_size=math.gcd(plan.resolved.micro_batch, share))
        forecast = plan.memory
        try:
            with logging_in_background():
                work[name](plan, *others)
        except (RuntimeError, MemoryError) as error:
            code, text = _explained(error, forecast)
            if not code:
                raise
            if code == supervision.LOST_CONNECTION:
                time.sleep(1)  # so that the launching process sees the end of the one that is lost before this one's
            explained = RunError(text)
            explained.exit_code = code
            raise explained from error
        # NCCL asks for it. After a failure it could wait for the others: the process just ends.
        torch.distributed.destroy_process_group()

    return guarded(run, resume_command="")


def _explained(error: RuntimeError | MemoryError, forecast: MemoryForecast) -> tuple[int, str]:
    """Exit code and words for a lack of memory, with a setting that would fit, or a lost connection; 0 for another."""
    message, rank = str(error).strip() or type(error).__name__, os.environ.get("RANK", "0")
    reason = message.splitlines()[0]
    if compilation.is_out_of_memory(error):
        pools = "; ".join(f"{pool.name} {pool.text}: {pool.parts_text}" for pool in forecast.pools)
        return supervision.OUT_OF_MEMORY, (
            f"out of memory in process {rank} of {forecast.num_processes}, at micro_batch_size "
            f"{forecast.config.micro_batch}. At its start: {pools}. {forecast.remedy()[1]}. No checkpoint was touched: "
            f"with such a setting the next start resumes. (The system's message: {reason})"
        )
    if "Too many open files" in message:
        return (
            RunError.exit_code,
            f"process {rank} may not open more files: raise the limit (ulimit -n 65536): {reason}",
        )
    if isinstance(error, torch.distributed.DistError) or any(mark in message for mark in _GLOO):
        return supervision.LOST_CONNECTION, (
            f"process {rank} lost the others, or waited too long for them: {reason}. If another process has failed, "
            "its message says why; if none has, see whether one was killed or the network is cut. No checkpoint was "
            "touched: the next start resumes from the newest, if there is one"
        )
    return 0, ""


def run_trial(plan: RunPlan, result_path: Path) -> None:
    """Train a few steps in this process and the others, log speed and memory, write nothing but the result.

    Raises:
        RunError: a process did not answer, or a loss was not finite.
    """
    processes, config, schedule = join(plan), plan.resolved, plan.schedule
    device, log = processes.device, processes.log
    pool = plan.memory.pools[0]
    run, guard = open_run(plan, processes), StepGuard(config)
    seen, seconds = profile_first_forward(run.model), list[float]()
    last_step = max(MIN_STEPS, min(MAX_STEPS, schedule.num_steps))
    # A run may have fewer steps, and its stages no samples after them: it begins again.
    steps, before = range(1, last_step + 1), lambda step: run.samples((step - 1) % schedule.num_steps)
    with closing(load_batches(run.batches, before, steps, device)) as loader:
        for step in steps:
            torch.distributed.barrier()
            learning_rate = schedule.learning_rate(min(step, schedule.num_steps))
            record = train_step(run.engine, processes, loader, step, learning_rate, guard, lambda: False)
            if record.skip_reason:
                raise RunError(f"trial step {step}: {record.skip_reason}: see lr, precision and the data")
            if step == 1:
                reason = compilation.reason_against(config.compile, device.type)
                eager = f"; layers not compiled ({reason})" if reason else ""
                log(f"kernels: {attention_kernels({event.name for event in seen.events()})}{eager}")
                continue
            seconds.append(record.seconds)
            # Of the slowest process, so that all of them leave after the same step.
            if max(processes.numbers_of_all(sum(seconds))) >= MEASURED_SECONDS and step >= MIN_STEPS:
                break
    typical, peak = median(seconds), int(max(processes.numbers_of_all(peak_memory(device))))
    log(
        f"trial of {step} steps: loss {record.loss:.3f}, {seconds_text(typical)} a step, "
        f"{count_text(schedule.batch_tokens / typical)} tok/s"
    )
    there = pool.available_bytes // pool.num_processes
    log(
        f"memory: the fullest process held {bytes_text(peak)} at most, {peak / there:.0%} of the {bytes_text(there)} "
        f"available to it, with micro_batch_size {config.micro_batch}"
    )
    if processes.is_first:
        write_json(result_path, asdict(TrialResult(peak, typical)))


def profile_first_forward(model: torch.nn.Module) -> profile:
    """Profile until the next forward pass of `model` is done, the very pass that trains: which attention kernel torch
    chooses varies by release and GPU. The result then holds its operators.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", _NO_LOG)
    seen = profile(activities=[ProfilerActivity.CPU])

    def end(*_: object) -> None:
        hook.remove()
        seen.stop()

    hook = model.register_forward_hook(end)
    seen.start()
    return seen


def attention_kernels(operators: Collection[str]) -> str:
    """Name what computes the attention, by the operators of a forward pass."""
    matches = [match for name in operators if (match := _KERNELS.fullmatch(name))]
    found = {match[match.lastindex or 0] for match in matches} or {"attention_math"}
    slow = " (plain operations, slow and with the matrix of all scores)" if "attention_math" in found else ""
    return f"attention by {' and '.join(sorted(found))}{slow}"


if __name__ == "__main__":
    supervision.leave(main(sys.argv[1:]))
