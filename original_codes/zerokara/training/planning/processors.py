"""Check, without torch where possible, that there are as many GPUs, or cores, as a run asks for.

CUDA silently hides the first GPU of CUDA_VISIBLE_DEVICES that does not exist and all behind it: one typing error, and
days are spent on the CPU. Here every GPU that is named must exist. Empty, or -1, asks for the CPU.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

from zerokara.config.machine import MachineSettings
from zerokara.errors import Fault, UserError
from zerokara.resources import available_cores

VARIABLE = "CUDA_VISIBLE_DEVICES"
SHARE_CORES_NAME = "ZEROKARA_SHARE_CORES"
"""Environment variable that allows more processes than cores on a CPU, to try things out."""
_DRIVER_SECONDS = 20
"""How long the driver may take to answer; one that sleeps takes a few seconds to wake up."""
_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Each is a sign of a driver: NVIDIA's, that of Windows' subsystem for Linux, or AMD's."""
_GPU_SETUP = "delete .venv and run ./setup.sh without --extra-index-url"


@dataclass(frozen=True)
class Gpu:
    """A GPU, as NVIDIA's driver lists it."""

    name: str
    uuid: str
    instances: tuple[str, ...] = ()
    """UUIDs of the instances that it is divided into (MIG)."""


def check_devices(config: MachineSettings) -> None:
    """Check that the GPUs that are named exist, and that there are as many GPUs, or cores, as processes.

    What only torch can tell (AMD's GPUs, or a driver that lists none) is left to `check_devices_seen`.

    Raises:
        UserError: a GPU does not exist, or there are too few.
    """
    named = named_gpus()
    gpus: list[Gpu] | None = []
    if named:
        gpus = listed()
        if gpus is not None and (rules := list(_misnamed(named, gpus))):
            remedy = f"name GPUs that exist ({_range_text(gpus)}), or leave" if gpus else "leave"
            raise _variable_error(rules, f"{remedy} it empty to train on the CPU")
        if not built_for_gpus():
            rule = f"names GPUs, and this torch ({_torch()['__version__']}) was built for the CPU alone"
            raise _variable_error([rule], f"{_GPU_SETUP}; or leave it empty to train on the CPU")
        _check_processes(config, len(named))
        return
    if named is None and built_for_gpus():
        if config.num_processes in ("auto", 1):
            return  # there is a processor of one kind or the other
        gpus = listed()
    if gpus is not None:
        _check_processes(config, len(gpus))


def check_devices_seen(config: MachineSettings, seen: int) -> None:
    """Check the same by the number of GPUs that torch sees."""
    named = named_gpus() or []
    if seen < len(named):
        rule = f"names {len(named)}, of which torch sees {seen}"
        raise _variable_error([rule], "name GPUs that exist, or leave it empty to train on the CPU")
    _check_processes(config, seen)


def unused(seen: int) -> str | None:
    """Explain why GPUs that the driver lists are not used, if torch sees none and nobody asked for the CPU."""
    if seen or named_gpus() is not None or not (gpus := listed()):
        return None
    names = ", ".join(gpu.name for gpu in gpus)
    if built_for_gpus():
        why = f"torch sees none: its CUDA {_torch()['cuda']} may need a newer driver"
    else:
        why = f"this torch ({_torch()['__version__']}) was built for the CPU alone: {_GPU_SETUP}"
    return f"{names}: not used, since {why} (set {VARIABLE}= to ask for the CPU)"


def named_gpus() -> list[str] | None:
    """The GPUs in CUDA_VISIBLE_DEVICES, by number or UUID; empty if it asks for the CPU; None if it is not set."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    # GPUs behind -1 are hidden on purpose; NoDevFiles is what Slurm sets for a job without GPUs.
    return list(takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), map(str.strip, text.split(","))))


@cache
def listed() -> list[Gpu] | None:
    """The GPUs that NVIDIA's driver lists; empty without a driver; None if there is a driver that lists none."""
    program = shutil.which("nvidia-smi") or shutil.which("/usr/lib/wsl/lib/nvidia-smi")
    if program:
        try:
            done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_DRIVER_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if gpus := _parse(done.stdout):
            return gpus
    return None if any(Path(trace).exists() for trace in _DRIVER_FILES) else []


def built_for_gpus() -> bool:
    """Whether the installed torch can compute on GPUs at all."""
    version = _torch()
    return bool(version.get("cuda", True) or version.get("hip"))


@cache
def _torch() -> dict[str, Any]:
    """The variables of torch's `version.py`, which loads in no time; empty if torch is not found."""
    spec = find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    return runpy.run_path(str(path)) if path and path.exists() else {}


def _parse(text: str) -> list[Gpu]:
    """Parse lines like ``GPU 0: NVIDIA H200 (UUID: GPU-1b…)`` and, below, ``  MIG 1g.18gb Device 0: (UUID: MIG-…)``."""
    gpus: list[Gpu] = []
    for kind, name, uuid in re.findall(r"^\s*(GPU|MIG) ([^\n]*?)\s*\(UUID: ([^)\s]+)\)", text, re.MULTILINE):
        if kind == "GPU":
            gpus.append(Gpu(name.partition(":")[2].strip(), uuid))
        elif gpus:
            gpus[-1] = Gpu(gpus[-1].name, gpus[-1].uuid, (*gpus[-1].instances, uuid))
    return gpus


def _misnamed(named: Sequence[str], gpus: Sequence[Gpu]) -> Iterator[str]:
    """The rule that each name breaks which is not one GPU's."""
    uuids = [uuid for gpu in gpus for uuid in (gpu.uuid, *gpu.instances)]
    for index, name in enumerate(named):
        if name in named[:index]:
            yield f"names {name} twice, and CUDA shows none then"
        elif name.isdecimal() and int(name) >= len(gpus):
            yield f"names GPU {name}; " + (f"there is {_range_text(gpus)}" if gpus else "there is no GPU here")
        elif not name.isdecimal() and not any(uuid.startswith(name) for uuid in uuids):
            yield f"names {name}, the number or the UUID of no GPU here"


def _range_text(gpus: Sequence[Gpu]) -> str:
    return f"GPU 0 to {len(gpus) - 1}" if len(gpus) > 1 else "only GPU 0"


def _variable_error(rules: Sequence[str], remedy: str) -> UserError:
    return UserError(Fault("the environment", rule, VARIABLE, os.environ[VARIABLE], remedy) for rule in rules)


def _check_processes(config: MachineSettings, gpus: int) -> None:
    if config.num_processes == "auto":
        return
    if gpus:
        if config.num_processes > gpus:
            rule = f"must be at most {gpus}, the number of GPUs ({VARIABLE} is honoured)"
            raise UserError(config.fault("num_processes", rule, f"try {gpus} or auto"))
        return
    num_cores = available_cores()
    if config.num_processes > num_cores and not os.environ.get(SHARE_CORES_NAME):
        rule = f"must be at most {num_cores}, the number of cores, since this run trains on the CPU"
        remedy = f"try {num_cores} or auto; to try more all the same, slowly: {SHARE_CORES_NAME}=1 in the environment"
        raise UserError(config.fault("num_processes", rule, remedy))
