"""The micro batch of `micro_batch_size: auto`, and the trials that measure what a run takes.

On a GPU it is the largest that fits, found by trials whose peak memory is measured; on a CPU as many tokens as make it
fastest. A micro batch of another size adds the same numbers up in another order, so the choice is kept in the run
folder with all that it was made for, and made again only when some of that has changed.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import orjson

from zerokara import supervision
from zerokara.errors import RunError
from zerokara.progress import bytes_text
from zerokara.training.planning.memory import CUDA_CONTEXT_BYTES, SAFE_SHARE, min_activation_bytes
from zerokara.training.planning.run_folder import EarlierRun
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.spawning import processes_text, spawn

CPU_TOKENS = 2048
"""On a CPU no size is larger than the first with so many tokens: a larger matrix product is no faster. Measured."""
_LAYOUT = {"global_batch_size", "precision", "optimizer", "zero_stage", "tensor_parallel_size", "offload"}
_LAYOUT |= {"activation_checkpointing"}


def first_choice(plan: RunPlan) -> int:
    """Return the largest size that almost certainly fits, on a CPU no larger than is faster; 1 where none does."""
    forecast = plan.memory
    sizes = forecast.micro_batch_sizes
    if forecast.device == "cpu":
        enough = [size for size in sizes if size * forecast.shape.input_len >= CPU_TOKENS]
        sizes = [size for size in sizes if not enough or size <= enough[0]]
    return next((size for size in reversed(sizes) if forecast.with_settings(micro_batch_size=size).fits), 1)


def kept(plan: RunPlan, earlier: EarlierRun | None) -> int | None:
    """Return the size of the run's last start, where that was `auto` too, in the same layout on the same machine."""
    was = earlier.plan if earlier else {}
    if "resolved" not in was or was["requested"]["micro_batch_size"] != "auto":
        return None
    gpu_bytes = plan.devices.gpu_bytes
    layout = [plan.num_processes, plan.nodes, plan.requested_template, gpu_bytes]
    before = [was["num_processes"], was["nodes"], was["deepspeed_template"]]
    before.append(was["devices"]["gpu_bytes"] if "devices" in was else gpu_bytes)  # earlier versions kept it elsewhere
    is_same = layout == before and all(was["resolved"][key] == getattr(plan.resolved, key) for key in _LAYOUT)
    return int(was["resolved"]["micro_batch_size"]) if is_same else None


def chosen(plan: RunPlan, earlier: EarlierRun | None) -> RunPlan:
    """Return the plan with its final micro batch: on a GPU that of trials, unless an earlier start has made them."""
    is_tried = plan.memory.device == "cpu" or kept(plan, earlier)
    return plan if is_tried or plan.requested.micro_batch_size != "auto" else try_steps(plan)[0]


@dataclass(frozen=True)
class TrialResult:
    """Measurements of a trial."""

    peak_bytes: int
    """Memory of the fullest process."""
    seconds_per_step: float


def try_steps(plan: RunPlan) -> tuple[RunPlan, TrialResult]:
    """Train a few steps that leave nothing behind; return the plan, on a GPU with the micro batch for `auto`.

    On this machine alone, whose processes then hold at least as much as among several.

    Raises:
        RunError: they failed, or ran out of memory with a micro batch that the user chose or that is the smallest.
    """
    alone = plan.on_processes(plan.processes_per_node, 1)
    print(f"trying a few steps in {processes_text(alone)}", flush=True)
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
    sizes, limit_bytes = forecast.micro_batch_sizes, SAFE_SHARE * forecast.pools[0].available_bytes - CUDA_CONTEXT_BYTES
    least = min_activation_bytes(forecast.with_settings(micro_batch_size=1))
    before_first = max(0, sizes.index(first_choice(plan)) - 1)
    waiting, fitting = sizes[before_first : before_first + 2], dict[int, TrialResult]()
    while waiting:
        size = waiting.pop(0)
        print(f"micro_batch_size: auto: trying {size}", flush=True)
        result = _tried(plan.with_settings(micro_batch_size=size))
        fits = result is not None and result.peak_bytes <= limit_bytes
        held = "ran out of memory" if result is None else f"held {bytes_text(result.peak_bytes)}"
        print(f"micro_batch_size: auto: {size} {'fits' if fits else 'does not fit'}: a process {held}", flush=True)
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
