"""Training processes of a plan: their start, and what is `auto` about the machine, by rules and by trials.

That is devices, precision, processes and micro batch.

On a GPU `micro_batch_size: auto` becomes the largest that fits, found by trials whose peak memory is measured; on a CPU
one with as many tokens as make it fastest. Another size adds the same numbers up in another order, so a run keeps its
micro batch as long as the settings of `_MICRO_BATCH_SETTINGS` stay. Each start chooses the ZeRO stage, which changes no
number.
"""

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from zerokara.errors import INTERRUPTED, RunError
from zerokara.progress import bytes_text, plural
from zerokara.resources import network_environment
from zerokara.training.planning import processors
from zerokara.training.planning.earlier_run import EarlierRun
from zerokara.training.planning.memory import SAFE_SHARE, MemoryForecast, TrialResult
from zerokara.training.planning.run_plan import PLAN_NAME, RunPlan
from zerokara.training.processes import supervision

if TYPE_CHECKING:  # it imports torch
    from zerokara.training.nodes.rendezvous import Rendezvous

CPU_TOKENS = 2048
"""Tokens of the largest micro batch on a CPU: a larger matrix product is no faster. Measured."""
_MICRO_BATCH_SETTINGS = (
    "global_batch_size", "precision", "optimizer", "tensor_parallel_size", "offload", "activation_checkpointing",
    "seq_len",
)  # fmt: skip


def on_this_machine(plan: RunPlan, earlier: EarlierRun | None = None) -> RunPlan:
    """Resolve devices, precision, processes, micro batch and ZeRO stage. From here on torch may be loaded.

    On a GPU a micro batch that no earlier start has chosen is a first guess: see `with_micro_batch`.

    Raises:
        UserError: there are too few GPUs or cores.
    """
    config, devices = plan.requested, processors.devices()
    micro = 1 if config.micro_batch_size == "auto" else config.micro_batch_size
    plan = replace(plan, devices=devices).with_settings(precision=devices.precision(config), micro_batch_size=micro)
    number = 1
    for number in devices.process_counts(config, plan.schedule.batch_tokens // plan.nodes):
        shares_batch = plan.resolved.global_batch % (plan.nodes * number * micro) == 0
        if shares_batch and replace(plan, num_processes=plan.nodes * number).memory.fits:
            break
    plan = plan.on_processes(plan.nodes * number)
    if config.micro_batch_size == "auto":
        plan = plan.with_settings(micro_batch_size=kept_micro_batch(plan, earlier) or first_micro_batch(plan.memory))
    if config.zero_stage == "auto":
        # Stage 1 sends 4 bytes of gradient for each parameter once a step, stage 2 in each micro batch, stage 3 weights
        # for each besides. With one micro batch stage 2 sends as much as stage 1, and holds less.
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
    return int(was["resolved"]["micro_batch_size"]) if before == here else None


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
    """Find the largest micro batch that fits, by trials from the first guess up, or down, by factors of two.

    Of a global batch that is no power of two, the next size that divides it is taken. The smallest of all is returned
    in any case; its result is None where even that ran out of memory.
    """
    forecast, size, tried = plan.memory, first_micro_batch(plan.memory), dict[int, TrialResult | None]()
    limit_bytes = SAFE_SHARE * forecast.pools[0].available_bytes - sum(forecast.uncounted.values())
    sizes = forecast.micro_batch_sizes
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


def spawn(plan: RunPlan, *work: str, rendezvous: "Rendezvous | None" = None, path: Path | None = None) -> int:
    """Run the training processes, which do `work` (`worker.main`), here or on each of the machines of a `rendezvous`.

    `path` is the file of the plan, where the run folder has one; otherwise a temporary one is written.

    Returns the exit code of the first process that fails, 0 where none does; the others are ended. Ctrl-C, SIGTERM and
    SIGHUP ask the training processes to stop at the end of a step; a second Ctrl-C kills them. If this process is
    killed, they save and exit. On several machines the run survives lost processes and machines, `max_restarts` times.

    Raises:
        KeyboardInterrupt: they were asked to stop, and have saved.
    """
    network = network_environment()
    if rendezvous:
        network = network_environment(rendezvous.address) | {supervision.FOLDER_NAME: str(rendezvous.folder_owner)}
    with contextlib.ExitStack() as stack:
        if path is None:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zerokara-plan-")), PLAN_NAME)
            plan.write(path)
        place, own = stack.enter_context(local_rendezvous()), plan.devices.process_environment(plan.processes_per_node)
        # The environment of this process, too: libraries read some variables when they are loaded.
        stack.callback(os.environ.update, dict(os.environ))
        stack.callback(os.environ.clear)
        os.environ |= {**network, **own, **place}
        # Where torch is loaded for the agent alone, the processes are forked, and need not load it once more. Where it
        # is there already it may have used a GPU or threads, with which a process cannot be forked.
        is_forked = "torch" not in sys.modules
        from zerokara.training.nodes import agent

        code = agent.run(plan, [str(path), *work], is_forked, rendezvous)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code == -signal.SIGKILL and rendezvous is None:
        reason = "nearly always by the kernel, for lack of main memory (dmesg tells)"
        print(f"failed: a training process was killed (SIGKILL), {reason}", file=sys.stderr)
    return code


@contextlib.contextmanager
def local_rendezvous() -> Iterator[dict[str, str]]:
    """Keep the rendezvous of this machine's processes as long as the block lasts; yield it for their environment.

    torch's usual one is a TCP port, which every user of the machine can reach, and change what is agreed there. This is
    a file without a name, in memory (memfd_create(2)). Processes open it through /proc, which Linux allows to the same
    user alone; it is gone with the last one that holds it.
    """
    with open(os.memfd_create("zerokara_rendezvous"), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        yield {supervision.RENDEZVOUS_NAME: f"/proc/{os.getpid()}/fd/{file.fileno()}"}
