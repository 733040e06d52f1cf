"""What is `auto` about the machine: devices, precision, compilation, processes, ZeRO stage, micro batch.

On a GPU `micro_batch_size: auto` becomes the largest that fits, found by trials whose peak memory is measured; on a CPU
one with as many tokens as make it fastest. Another size sums the same numbers in another order, so a run keeps its
micro batch while the settings in `_MICRO_BATCH_SETTINGS` stay the same. Each start chooses the ZeRO stage anew, because
it changes no result.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson

from zerokara.base.errors import RunError
from zerokara.base.progress import bytes_text, plural
from zerokara.training.planning import processors
from zerokara.training.planning.earlier_run import EarlierRun
from zerokara.training.planning.memory import SAFE_SHARE, MemoryForecast, TrialResult
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.processes import supervision
from zerokara.training.spawning import spawn

CPU_TOKENS = 2048
"""Tokens of the largest micro batch on a CPU: a larger matrix product is no faster. Measured."""
LONG_RUN = 5e14
"""Floating point operations of a run on a CPU with AMX that is worth compiling: some twenty minutes (decisions.md)."""
_MICRO_BATCH_SETTINGS = (
    "global_batch_size", "precision", "optimizer", "tensor_parallel_size", "offload", "activation_checkpointing",
)  # fmt: skip


def on_this_machine(plan: RunPlan, earlier: EarlierRun | None = None) -> RunPlan:
    """Resolve devices, precision, compilation, processes, micro batch and ZeRO stage. From here on torch may be loaded.

    On a GPU a micro batch that no earlier start has chosen is a first guess: see `with_micro_batch`.

    Raises:
        UserError: there are too few GPUs or cores.
    """
    config, devices = plan.requested, processors.devices()
    micro = 1 if config.micro_batch_size == "auto" else config.micro_batch_size
    plan = replace(plan, devices=devices).with_settings(precision=devices.precision(config), micro_batch_size=micro)
    operations = plan.shape.flops_per_token() * plan.schedule.batch_tokens * plan.schedule.num_steps
    if config.compile == "auto" and devices.has_amx and plan.resolved.precision == "bf16" and operations >= LONG_RUN:
        plan = plan.with_settings(compile="on")
    for number in devices.process_counts(config, plan.schedule.batch_tokens // plan.nodes):
        shares_batch = plan.resolved.global_batch % (plan.nodes * number * micro) == 0
        if shares_batch and replace(plan, num_processes=plan.nodes * number).memory.fits:
            break
    if devices.gpu_names and config.num_processes == "auto" and "global_batch_size" in plan.reasons:
        # As many as divide the batch: few examples have a small one, and three GPUs do not divide a power of two.
        width, share = config.tensor_parallel_size, plan.resolved.global_batch // (plan.nodes * micro)
        number = width * max((each for each in range(1, number // width + 1) if share % each == 0), default=1)
    plan = plan.on_processes(plan.nodes * number)
    if config.micro_batch_size == "auto":
        plan = plan.with_settings(micro_batch_size=kept_micro_batch(plan, earlier) or first_micro_batch(plan.memory))
    if config.zero_stage == "auto":
        # Stage 1 sends 4 bytes of gradient per parameter once per step, stage 2 once per micro batch; stage 3 also
        # sends the weights once per micro batch. With one micro batch stage 2 sends as much as stage 1, and holds less.
        has_one = plan.resolved.global_batch == plan.resolved.micro_batch * plan.data_parallel_size
        stages = range(max(plan.resolved.stage, 2 if has_one else 1), 4)
        stage = next((number for number in stages if plan.memory.with_settings(zero_stage=number).fits), stages[-1])
        plan = plan.with_settings(zero_stage=stage)
    return plan


def first_micro_batch(forecast: MemoryForecast) -> int:
    """Return the largest size that almost certainly fits, on a CPU no larger than is faster; 1 where none does."""
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
    here = [plan.num_processes, plan.nodes, plan.requested_template, plan.devices.gpu_bytes]
    before += [was["requested"]["zero_stage"], *(was["resolved"][key] for key in _MICRO_BATCH_SETTINGS)]
    here += [plan.requested.zero_stage, *(getattr(plan.resolved, key) for key in _MICRO_BATCH_SETTINGS)]
    size = int(was["resolved"]["micro_batch_size"])
    return size if before == here and size in plan.memory.micro_batch_sizes else None


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
        size, result = _largest_on_gpu(alone, plan.memory.micro_batch_sizes)
    if result is None:
        raise RunError("the trial ran out of memory; the messages above say where. Nothing was written")
    return plan.with_settings(micro_batch_size=size), result


def _largest_on_gpu(plan: RunPlan, sizes: Sequence[int]) -> tuple[int, TrialResult | None]:
    """Find the largest micro batch of `sizes` that fits, by trials from the first guess up, or down, by factors of two.

    A size that does not divide the global batch is replaced by the next one that does. If no size fits, the smallest is
    returned; its result is None if even that ran out of memory.
    """
    forecast, first, tried = plan.memory, first_micro_batch(plan.memory), dict[int, TrialResult | None]()
    size = max(each for each in sizes if each <= first)
    limit_bytes = SAFE_SHARE * forecast.pools[0].available_bytes - sum(forecast.uncounted.values())
    while size not in tried:
        print(f"micro_batch_size: auto: trying {size}", flush=True)
        result = _tried(plan.with_settings(micro_batch_size=size))
        fits = result is not None and result.peak_bytes <= limit_bytes
        peak = "ran out of memory" if result is None else f"took {bytes_text(result.peak_bytes)}"
        print(f"micro_batch_size: auto: {size} {'fits' if fits else 'does not fit'}: a process {peak}", flush=True)
        tried[size] = result if fits or size == sizes[0] else None
        if fits:
            size = next((larger for larger in sizes if larger >= 2 * size), size)
        else:
            size = next((smaller for smaller in reversed(sizes) if 2 * smaller <= size), size)
    largest = max((tried_size for tried_size, result in tried.items() if result), default=sizes[0])
    return largest, tried[largest]


def _tried(plan: RunPlan) -> TrialResult | None:
    """Run a trial; None where a process ran out of memory."""
    with tempfile.TemporaryDirectory(prefix="zerokara-trial-") as folder:
        path = Path(folder, "result.json")
        code = spawn(plan, "trial", str(path))
        if code and code != supervision.OUT_OF_MEMORY:
            raise RunError(f"the trial ended with exit code {code}; the messages above say why. Nothing was written")
        return None if code else TrialResult(**orjson.loads(path.read_bytes()))
