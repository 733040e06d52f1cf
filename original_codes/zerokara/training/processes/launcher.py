"""The machine that training processes find: its devices, and their environment. Torch is imported where GPUs may be."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import psutil

from zerokara.config.machine import MachineSettings
from zerokara.progress import plural
from zerokara.resources import available_cores
from zerokara.training.planning import processors
from zerokara.training.planning.schedule import STARTED_NAME
from zerokara.training.processes import supervision


def process_environment(processes: int) -> dict[str, str]:
    """What each of this machine's training processes finds in its environment, beside what was there."""
    environment = {STARTED_NAME: str(psutil.Process().create_time()), supervision.PARENT_NAME: str(os.getpid())}
    environment["PYTHONSAFEPATH"] = "1"  # a file of the current folder is not imported as a package of the same name
    if not _num_gpus():
        return environment | {"DS_ACCELERATOR": "cpu", processors.VARIABLE: "", **processors.cpu_environment(processes)}
    named = processors.named_gpus()
    devices = named[:processes] if named else [str(number) for number in range(processes)]
    return environment | {processors.VARIABLE: ",".join(devices)}


def rank_environment(rank: int, num_processes: int) -> dict[str, str]:
    """Environment of a process among those of one node, as torchrun has it."""
    size = str(num_processes)
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}


def _cuda() -> Any:
    """torch.cuda. Importing torch takes about a second, and happens only after the configuration was checked."""
    import torch

    return torch.cuda


def _num_gpus() -> int:
    """GPUs that torch sees; one that was built for the CPU alone need not be imported for it."""
    return _cuda().device_count() if processors.built_for_gpus() else 0


def num_processes(config: MachineSettings) -> int:
    """Processes to start: the configured number, or one for each GPU that torch sees, or at least one on a CPU.

    Raises:
        UserError: more are configured than there are GPUs or cores; or torch does not see a GPU that is named.
    """
    num_gpus = _num_gpus()
    processors.check_processes(config, num_gpus)
    return max(1, num_gpus) if config.num_processes == "auto" else config.num_processes


def precision(config: MachineSettings) -> Literal["bf16", "fp32"]:
    """The configured precision; for ``auto`` bf16 where the device computes in it, fp32 where it would emulate it."""
    if config.precision != "auto":
        return config.precision
    if _num_gpus():
        return "bf16" if _cuda().is_bf16_supported(including_emulation=False) else "fp32"
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return "bf16" if "amx_bf16" in flags or "avx512_bf16" in flags else "fp32"


def gpu_bytes() -> int | None:
    """Memory of the smallest GPU; None if torch sees none."""
    properties = [_cuda().get_device_properties(index) for index in range(_num_gpus())]
    return min((each.total_memory for each in properties), default=None)


def device_rows(num_processes: int) -> list[tuple[str, str]]:
    """The devices of the training processes, as rows of the plan; with a note if they may not be the ones intended."""
    num_gpus = _num_gpus()
    if num_gpus:
        names = Counter(_cuda().get_device_name(index) for index in range(num_processes))
        device = "GPU, " + ", ".join(f"{number} × {name}" for name, number in names.items())
        device += f" ({num_gpus - num_processes} more not used)" if num_gpus > num_processes else ""
    else:
        num_cores, num_threads = plural(available_cores(), "core"), plural(processors.threads(num_processes), "thread")
        device = f"CPU, {num_cores}, {num_threads} a process"
    note = processors.unused(num_gpus)
    return [("device", device), *([("note", note)] if note else [])]
