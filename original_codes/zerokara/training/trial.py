"""A trial before a run that costs days: the real processes train a few steps of the real model on the real data.

For ``--dry-run``, and for ``micro_batch_size: auto`` on a GPU. What the steps learn is thrown away, and nothing is
written. They tell the speed, the kernels, and the memory at its peak, which no arithmetic foresees.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed

from zerokara.errors import RunError
from zerokara.model import compilation, variable_length
from zerokara.model.shapes import ModelShape
from zerokara.progress import count_text, seconds_text
from zerokara.training.compute import devices
from zerokara.training.guards import StepGuard
from zerokara.training.loop import train_step
from zerokara.training.planning.memory_forecast import MachineMemory
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.run import Run, join, open_run
from zerokara.training.trial_launch import PEAK_FILE_NAME

NUM_STEPS = 3
"""The first is slow (memory is taken, kernels are chosen) and does not count."""


def run_trial(plan: RunPlan) -> None:
    """Train a few steps in this process and the others, log speed and memory, write nothing.

    Raises:
        RunError: a process did not answer, or a loss was not finite.
    """
    processes = join(plan)
    available = MachineMemory.available(plan.num_processes, devices.gpu_memory(processes.device))
    run = open_run(plan, processes)
    _log_kernels(run)
    seconds, loss = _steps(run)
    _log_result(run, seconds, loss, available)


def _steps(run: Run) -> tuple[float, float]:
    """Mean seconds of a step without the first, and the loss of the last."""
    plan = run.plan
    guard, seconds, loss = StepGuard(plan.config.spike_sigmas, plan.config.max_skipped_steps), [], 0.0
    with closing(run.loader(NUM_STEPS)) as loader:
        for step in range(1, NUM_STEPS + 1):
            torch.distributed.barrier()
            learning_rate = plan.schedule.learning_rate(min(step, plan.schedule.num_steps))
            record = train_step(run.engine, run.processes, loader.take, step, learning_rate, guard, lambda: False)
            if record.skip_reason:
                raise RunError(f"trial step {step}: {record.skip_reason}: see lr, precision and the data")
            seconds.append(record.seconds)
            loss = record.loss
    return sum(seconds[1:]) / len(seconds[1:]), loss


def _log_kernels(run: Run) -> None:
    config = run.plan.config
    optimizer = {"adamw": "torch's fused AdamW", "adafactor": "Adafactor", "muon": "Muon, and torch's fused AdamW"}
    reason = compilation.reason_against(config.compile, run.processes.device.type, config.zero_stage)
    attention = attention_kernel(run.plan.shape, config.precision, config.intra_document_masking, run.processes.device)
    compiled = f"; layers not compiled ({reason})" if reason else ""
    run.processes.log(f"kernels: {attention}; {optimizer[config.optimizer]}{compiled}")


def attention_kernel(shape: ModelShape, precision: str, intra_document_masking: bool, device: torch.device) -> str:
    """Name the kernel that `scaled_dot_product_attention` takes in a training step, as torch reports it."""
    has_bias = shape.traits.positions == "relative"
    if device.type == "cpu":
        plain = "plain operations, because of the learned relative position bias, and "
        return f"attention by {plain if has_bias else ''}torch's flash kernel for CPUs"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    size = (1, shape.num_attn_heads, shape.seq_len, shape.head_dim)
    query = torch.empty(size, dtype=dtype, device=device)
    if intra_document_masking and variable_length.has_kernel(query, shape.head_dim):
        return "attention by FlashAttention, document by document"
    pairs = (1, 1, shape.seq_len, shape.seq_len)
    mask = torch.ones(pairs, dtype=torch.bool, device=device) if intra_document_masking else None
    if has_bias:
        mask = torch.zeros(pairs, dtype=dtype, device=device, requires_grad=True).expand(-1, size[1], -1, -1)
    asked = torch.backends.cuda.SDPAParams(query, query, query, mask, 0.0, mask is None, False)
    for name, can in (
        ("FlashAttention", torch.backends.cuda.can_use_flash_attention),
        ("cuDNN", torch.backends.cuda.can_use_cudnn_attention),
        ("the memory-efficient kernel", torch.backends.cuda.can_use_efficient_attention),
    ):
        if can(asked, False):
            return f"attention by {name}"
    return "attention by plain operations, slow and with the matrix of all scores: no fused kernel takes this shape"


def _log_result(run: Run, seconds: float, loss: float, available: MachineMemory) -> None:
    processes, schedule = run.processes, run.plan.schedule
    peak = processes.max(devices.peak_memory(processes.device))
    speed = schedule.batch_tokens / seconds
    processes.log(
        f"trial of {NUM_STEPS} steps: loss {loss:.3f}, {seconds_text(seconds)} a step, {count_text(speed)} tok/s; "
        f"all {schedule.num_steps:,} steps would take {seconds_text(schedule.num_steps * seconds)}, validations and "
        "saves not counted"
    )
    processes.log(f"memory: {run.plan.memory_forecast(available).measured_text(int(peak))}")
    if processes.is_first and (path := os.environ.get(PEAK_FILE_NAME)):
        Path(path).write_text(str(int(peak)), encoding="ascii")
