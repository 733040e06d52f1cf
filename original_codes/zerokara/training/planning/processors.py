"""Whether there are as many GPUs, or cores, as a run asks for: found out without torch, wherever that can be.

CUDA's own rule for CUDA_VISIBLE_DEVICES is to hide the first GPU that does not exist and all behind it without a word:
a typing error, and days are spent on the CPU. Here what is named must be there. Empty, or -1, asks for the CPU.
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

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import Fault, UserError
from zerokara.resources import available_cores

VARIABLE = "CUDA_VISIBLE_DEVICES"
SHARE_CORES_NAME = "ZEROKARA_SHARE_CORES"
"""Environment variable with which more processes than cores are started on a CPU, for who wants to try things out."""
_SECONDS = 20
"""How long the driver may take to answer; one that sleeps takes a few seconds to wake up."""
_TRACES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Where one of these is, there is a driver: NVIDIA's, that of Windows' subsystem for Linux, or AMD's."""
_TO_USE_THEM = "delete .venv and run ./setup.sh without --extra-index-url"


@dataclass(frozen=True)
class Gpu:
    """A GPU, as NVIDIA's driver lists it."""

    name: str
    uuid: str
    parts: tuple[str, ...] = ()
    """UUIDs of the instances into which it is divided (MIG)."""


def check(config: PretrainConfig) -> None:
    """See that the GPUs that are named are there, and that there are as many GPUs, or cores, as processes.

    What only torch can tell (where AMD has made the GPUs, or the driver does not list them) is left to `check_seen`.

    Raises:
        UserError: they are not there, or too few.
    """
    named = named_gpus()
    there: list[Gpu] | None = []
    if named:
        there = listed()
        if there is not None and (rules := list(_misnamed(named, there))):
            found = f"name what is there ({_numbers(there)}), or leave" if there else "leave"
            raise _of_variable(rules, f"{found} it empty to train on the CPU")
        if not built_for_gpus():
            rule = f"names GPUs, and this torch ({_torch()['__version__']}) was built for the CPU alone"
            raise _of_variable([rule], f"{_TO_USE_THEM}; or leave it empty to train on the CPU")
        _check_processes(config, len(named))
        return
    if named is None and built_for_gpus():
        if config.num_processes in ("auto", 1):
            return  # there is a processor of one kind or the other
        there = listed()
    if there is not None:
        _check_processes(config, len(there))


def check_seen(config: PretrainConfig, seen: int) -> None:
    """As `check`, by the number of GPUs that torch sees."""
    named = named_gpus() or []
    if seen < len(named):
        rule = f"names {len(named)}, of which torch sees {seen}"
        raise _of_variable([rule], "name GPUs that are there, or leave it empty to train on the CPU")
    _check_processes(config, seen)


def unused(seen: int) -> str | None:
    """A word where the driver lists GPUs, torch sees none of them, and nobody asked for the CPU."""
    if seen or named_gpus() is not None or not (there := listed()):
        return None
    names = ", ".join(gpu.name for gpu in there)
    if built_for_gpus():
        why = f"torch sees none: its CUDA {_torch()['cuda']} may need a newer driver"
    else:
        why = f"this torch ({_torch()['__version__']}) was built for the CPU alone: {_TO_USE_THEM}"
    return f"{names} would be there, but {why} ({VARIABLE}= says that the CPU is meant)"


def named_gpus() -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES names: numbers or UUIDs; none where it asks for the CPU; None where it is not set."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    # What stands behind -1 is hidden on purpose; NoDevFiles is Slurm's word for a job without GPUs.
    return list(takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), map(str.strip, text.split(","))))


@cache
def listed() -> list[Gpu] | None:
    """The GPUs that NVIDIA's driver lists; none where there is no driver; None where there is one that lists none."""
    program = shutil.which("nvidia-smi") or shutil.which("/usr/lib/wsl/lib/nvidia-smi")
    if program:
        try:
            done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if found := _read(done.stdout):
            return found
    return None if any(Path(trace).exists() for trace in _TRACES) else []


def built_for_gpus() -> bool:
    """Whether the torch that is installed can compute on GPUs at all."""
    built = _torch()
    return bool(built.get("cuda", True) or built.get("hip"))


@cache
def _torch() -> dict[str, Any]:
    """What torch says of itself in its `version.py`, which loads in no time; empty where it is not found."""
    spec = find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    return runpy.run_path(str(path)) if path and path.exists() else {}


def _read(text: str) -> list[Gpu]:
    """Read lines like ``GPU 0: NVIDIA H200 (UUID: GPU-1b…)`` and, below, ``  MIG 1g.18gb Device 0: (UUID: MIG-…)``."""
    gpus: list[Gpu] = []
    for kind, name, uuid in re.findall(r"^\s*(GPU|MIG) ([^\n]*?)\s*\(UUID: ([^)\s]+)\)", text, re.MULTILINE):
        if kind == "GPU":
            gpus.append(Gpu(name.partition(":")[2].strip(), uuid))
        elif gpus:
            gpus[-1] = Gpu(gpus[-1].name, gpus[-1].uuid, (*gpus[-1].parts, uuid))
    return gpus


def _misnamed(named: Sequence[str], there: Sequence[Gpu]) -> Iterator[str]:
    """A rule for each name that is none of a GPU."""
    uuids = [uuid for gpu in there for uuid in (gpu.uuid, *gpu.parts)]
    for index, name in enumerate(named):
        if name in named[:index]:
            yield f"names {name} twice, and CUDA shows none then"
        elif name.isdecimal() and int(name) >= len(there):
            yield f"names GPU {name}; " + (f"there is {_numbers(there)}" if there else "there is no GPU here")
        elif not name.isdecimal() and not any(uuid.startswith(name) for uuid in uuids):
            yield f"names {name}, the number or the UUID of no GPU here"


def _numbers(there: Sequence[Gpu]) -> str:
    return f"GPU 0 to {len(there) - 1}" if len(there) > 1 else "GPU 0 alone"


def _of_variable(rules: Sequence[str], remedy: str) -> UserError:
    return UserError(Fault("the environment", rule, VARIABLE, os.environ[VARIABLE], remedy) for rule in rules)


def _check_processes(config: PretrainConfig, gpus: int) -> None:
    if config.num_processes == "auto":
        return
    if gpus:
        if config.num_processes > gpus:
            rule = f"must be at most {gpus}, the GPUs that there are ({VARIABLE} is honoured)"
            raise UserError(config.fault("num_processes", rule, f"try {gpus} or auto"))
        return
    there = available_cores()
    if config.num_processes > there and not os.environ.get(SHARE_CORES_NAME):
        rule = f"must be at most {there}, the cores that there are for it, as it trains on the CPU"
        remedy = f"try {there} or auto; to try out more all the same, slowly: {SHARE_CORES_NAME}=1 in the environment"
        raise UserError(config.fault("num_processes", rule, remedy))
