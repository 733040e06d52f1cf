"""What is `auto` about the machine: devices, precision, processes and micro batch, by rules and by trials.

On a GPU `micro_batch_size: auto` becomes the largest that fits, found by trials whose peak memory is measured; on a CPU
one with as many tokens as make it fastest, and a long run tries how many processes are. Another size adds the same
numbers up in another order, so a run keeps its micro batch as long as the settings of `_MICRO_BATCH_SETTINGS` stay, and
its processes as long as the machine stays. Each start chooses the ZeRO stage, which changes no number.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson

from zerokara.errors import RunError
from zerokara.progress import bytes_text, plural, seconds_text
from zerokara.training.planning import processors
from zerokara.training.planning.earlier_run import EarlierRun
from zerokara.training.planning.memory import SAFE_SHARE, TrialResult, min_activation_bytes
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.processes import supervision
from zerokara.training.spawning import spawn

CPU_TOKENS = 2048
"""Tokens of the largest micro batch on a CPU: a larger matrix product is no faster. Measured."""
SHORT_RUN_SECONDS, CPU_FLOPS = 600, 20e9
"""A run on a CPU that is over in so many seconds, at so many operations a second of a core, is not worth trials, each
of which takes four seconds or more."""
_MICRO_BATCH_SETTINGS = {
    "global_batch_size", "precision", "optimizer", "tensor_parallel_size", "offload", "activation_checkpointing",
    "seq_len",
}  # fmt: skip


def on_this_machine(plan: RunPlan, earlier: EarlierRun | None = None) -> RunPlan:
    """Resolve devices, precision, processes and micro batch. From here on torch may be loaded.

    On a GPU a micro batch that no earlier start has chosen is a first guess: see `with_micro_batch`.

    Raises:
        UserError: there are too few GPUs or cores.
    """
    config, devices = plan.requested, processors.devices()
    micro = 1 if config.micro_batch_size == "auto" else config.micro_batch_size
    plan = replace(plan, devices=devices).with_settings(precision=devices.precision(config), micro_batch_size=micro)
    counts = process_counts(plan)
    return _on_processes(plan, kept_processes(plan, earlier, counts) or counts[0], earlier)


def process_counts(plan: RunPlan) -> list[int]:
    """Return the numbers of processes of a machine that share the batch and fit, the largest first; at last 1."""
    micro = 1 if plan.requested.micro_batch_size == "auto" else plan.resolved.micro_batch
    counts = plan.devices.process_counts(plan.requested, plan.schedule.batch_tokens // plan.nodes)
    fitting = [
        number
        for number in counts
        if plan.resolved.global_batch % (plan.nodes * number * micro) == 0
        and replace(plan, num_processes=plan.nodes * number).memory.fits
    ]
    return fitting or counts[-1:]


def _on_processes(plan: RunPlan, number: int, earlier: EarlierRun | None) -> RunPlan:
    plan = plan.on_processes(plan.nodes * number)
    if plan.requested.micro_batch_size == "auto":
        plan = plan.with_settings(micro_batch_size=kept_micro_batch(plan, earlier) or first_micro_batch(plan))
    if plan.requested.zero_stage == "auto":
        # Stage 1 sends 4 bytes of gradient for each parameter once a step, stage 2 in each micro batch, stage 3 weights
        # for each besides. With one micro batch stage 2 sends as much as stage 1, and holds less.
        has_one = plan.resolved.global_batch == plan.resolved.micro_batch * plan.data_parallel_size
        stages = range(max(plan.resolved.stage, 2 if has_one else 1), 4)
        stage = next((each for each in stages if plan.memory.with_settings(zero_stage=each).fits), stages[-1])
        plan = plan.with_settings(zero_stage=stage)
    return plan


def first_micro_batch(plan: RunPlan) -> int:
    """Return the largest size that almost certainly fits, on a CPU no larger than is faster; 1 where none does."""
    forecast = plan.memory
    sizes = forecast.micro_batch_sizes
    if forecast.device == "cpu":
        enough = [size for size in sizes if size * forecast.shape.input_len >= CPU_TOKENS]
        sizes = [size for size in sizes if not enough or size <= enough[0]]
    return next((size for size in reversed(sizes) if forecast.with_settings(micro_batch_size=size).fits), 1)


def kept_micro_batch(plan: RunPlan, earlier: EarlierRun | None) -> int | None:
    """Return the size of the run's last start, where that was `auto` too, in the same layout on the same machine."""
    if not earlier or earlier.plan["requested"]["micro_batch_size"] != "auto":
        return None
    was = earlier.plan
    before = [was["num_processes"], was["nodes"], was["deepspeed_template"], was["devices"]["gpu_bytes"]]
    before.append(was["requested"]["zero_stage"])
    here = [plan.num_processes, plan.nodes, plan.requested_template, plan.devices.gpu_bytes, plan.requested.zero_stage]
    is_same = before == here
    is_same &= all(was["resolved"][key] == getattr(plan.resolved, key) for key in _MICRO_BATCH_SETTINGS)
    return int(was["resolved"]["micro_batch_size"]) if is_same else None


def kept_processes(plan: RunPlan, earlier: EarlierRun | None, counts: Sequence[int]) -> int | None:
    """Return the number of the run's last start, where that was `auto` on a CPU like this one and is still possible."""
    was = earlier.plan if earlier else {}
    if plan.devices.gpu_names or was.get("devices") != orjson.loads(orjson.dumps(plan.devices)):
        return None
    number = was["num_processes"] // was["nodes"]
    return number if was["requested"]["num_processes"] == "auto" and number in counts else None


def with_processes(plan: RunPlan, earlier: EarlierRun | None) -> RunPlan:
    """Return the plan with the number of processes for `auto` on a CPU that trials of a few steps find fastest.

    They are tried from the most down, until fewer, with more threads each, are slower. An earlier start has chosen
    already; and a run of minutes would lose more by trials than it gains, and goes by `processors.MIN_PROCESS_TOKENS`.
    """
    counts = process_counts(plan)
    flops = plan.schedule.num_tokens * plan.shape.flops_per_token()
    is_short = flops < SHORT_RUN_SECONDS * CPU_FLOPS * plan.devices.cores
    if plan.devices.gpu_names or not counts[1:] or is_short or kept_processes(plan, earlier, counts):
        return plan
    fastest, least = plan, math.inf
    for number in counts:
        other = _on_processes(plan, number, earlier)
        result = _tried(other)
        seconds = result.seconds_per_step if result else math.inf
        print(f"num_processes: auto: {number} took {seconds_text(seconds)} a step", flush=True)
        if seconds > least:
            break
        fastest, least = other, seconds
    return fastest


def with_micro_batch(plan: RunPlan, earlier: EarlierRun | None) -> RunPlan:
    """Return the plan with its final micro batch: on a GPU that of trials, unless an earlier start has made them."""
    is_known = plan.memory.device == "cpu" or kept_micro_batch(plan, earlier)
    return plan if is_known or plan.requested.micro_batch_size != "auto" else try_steps(plan)[0]


def try_steps(plan: RunPlan) -> tuple[RunPlan, TrialResult]:
    """Train a few steps that leave nothing behind; return the plan, on a GPU with the micro batch for `auto`.

    This machine trains alone: its processes then hold at least as much as among several.

    Raises:
        RunError: they failed, or ran out of memory with a micro batch that the user chose or that is the smallest.
    """
    alone = plan.on_processes(plan.processes_per_node, 1)
    print(f"trying a few steps in {plural(alone.num_processes, 'process', 'processes')}", flush=True)
    if plan.requested.micro_batch_size != "auto" or alone.memory.device == "cpu":
        size, result = plan.resolved.micro_batch, _tried(alone)
    else:
        size, result = _largest_on_gpu(alone)
    if result is None:
        raise RunError("the trial ran out of memory; the messages above say where. Nothing was written")
    return plan.with_settings(micro_batch_size=size), result


def _largest_on_gpu(plan: RunPlan) -> tuple[int, TrialResult | None]:
    """Find the largest micro batch that fits, from the measured peaks of smaller ones; None where not even 1 does.

    Two neighbours are tried first, the larger of which almost certainly fits: their difference is what a sequence takes
    (at least its `min_activation_bytes`: the update may set both peaks). The largest that fits by that is next, and
    smaller ones where it does not.

    Example: 14 GB with 4 sequences and 18 GB with 8 of at most 256, within 80 GB: 64 is next. If that takes 74 GB, it
    is the choice; if it runs out of memory, 32 is next.
    """
    forecast = plan.memory
    sizes, gpu = forecast.micro_batch_sizes, forecast.pools[0]
    limit_bytes = SAFE_SHARE * gpu.available_bytes - sum(forecast.uncounted.values())
    least = min_activation_bytes(forecast.with_settings(micro_batch_size=1))
    before_first = max(0, sizes.index(first_micro_batch(plan)) - 1)
    waiting, fitting = sizes[before_first : before_first + 2], dict[int, TrialResult]()
    while waiting:
        size = waiting.pop(0)
        print(f"micro_batch_size: auto: trying {size}", flush=True)
        result = _tried(plan.with_settings(micro_batch_size=size))
        fits = result is not None and result.peak_bytes <= limit_bytes
        peak = "ran out of memory" if result is None else f"took {bytes_text(result.peak_bytes)}"
        print(f"micro_batch_size: auto: {size} {'fits' if fits else 'does not fit'}: a process {peak}", flush=True)
        if result is not None and fits:
            fitting[size] = result
            if len(fitting) > 1 and not waiting:
                smaller = sorted(fitting)[-2]
                grown = (result.peak_bytes - fitting[smaller].peak_bytes) / (size - smaller)
                reach = size + (limit_bytes - result.peak_bytes) / max(least, grown)
                waiting = [each for each in sizes if size < each <= reach][-1:]
        else:
            sizes = [each for each in sizes if each < size]
            if not sizes:
                return size, result
            waiting = [each for each in sizes if each > max(fitting, default=0)][-1:]
    return max(fitting), fitting[max(fitting)]


def _tried(plan: RunPlan) -> TrialResult | None:
    """Run a trial; None where a process ran out of memory."""
    with tempfile.TemporaryDirectory(prefix="zerokara-trial-") as folder:
        path = Path(folder, "result.json")
        code = spawn(plan, "trial", str(path))
        if code and code != supervision.OUT_OF_MEMORY:
            raise RunError(f"the trial ended with exit code {code}; the messages above say why. Nothing was written")
        return None if code else TrialResult(**orjson.loads(path.read_bytes()))
