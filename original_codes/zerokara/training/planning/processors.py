"""GPUs and cores of a machine, and how the processes of a run share them. Without torch where possible.

CUDA silently hides the first GPU in CUDA_VISIBLE_DEVICES that does not exist, and all after it: because of one typing
error a run would spend days on the CPU. So torch must see every GPU that is named, and be able to compute on it. If
none is named, no GPU of the machine is silently left out either. Empty, or -1, asks for the CPU.
"""

import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Literal

from zerokara.base.errors import Fault, UserError
from zerokara.base.progress import plural
from zerokara.base.resources import available_cores
from zerokara.config.engine import MachineSettings

VARIABLE = "CUDA_VISIBLE_DEVICES"
PARENT_NAME = "ZEROKARA_LAUNCHER"
"""Environment variable with the process id of the launching process."""
SHARE_CORES_NAME = "ZEROKARA_SHARE_CORES"
"""Environment variable that allows more processes than cores on a CPU, to try things out."""
MIN_PROCESS_TOKENS = 1024
"""Tokens of a step for each process on a CPU: with fewer its matrices are too small to be worth a process."""
_THREADS_NAME = "OMP_NUM_THREADS"
_ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of torch's GPU allocator; of torch 2.13's two readers (c10) one prefers the first, the other the second."""
_MAX_COMPILE_THREADS = 32
"""torch's own limit (torch/_inductor/config.py, 2.13), which however takes all cores in every process."""


def named_gpus() -> list[str] | None:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, by number or UUID; empty for the CPU; None if it is not set."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    # GPUs behind -1 are hidden on purpose; NoDevFiles is what Slurm sets for a job without GPUs.
    return list(takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), map(str.strip, text.split(","))))


@dataclass(frozen=True)
class Devices:
    """Devices of this machine, looked up once: the GPUs that torch sees, or without any its cores."""

    gpu_names: tuple[str, ...] = ()
    gpu_bytes: int | None = None  # of the smallest GPU; None without any
    computes_bf16: bool = False  # in hardware; otherwise it would be emulated
    computes_fp8: bool = False
    has_amx: bool = False  # a CPU whose matrix products in bf16 leave more time to all else
    unusable: str = ""  # why torch computes on none of the GPUs that it was built for

    def process_counts(self, config: MachineSettings, batch_tokens: int) -> list[int]:
        """Return the numbers of processes to try, the largest first: the configured one, or one for each GPU.

        On a CPU, for steps of `batch_tokens`, numbers that divide the cores (docs/decisions.md); the last is 1.

        Raises:
            UserError: more are configured than there are GPUs or cores; or torch does not see a GPU, or cannot use it.
        """
        seen, named, torch = len(self.gpu_names), named_gpus(), version("torch")
        rule, on_cpu = "", "leave it empty to train on the CPU"
        remedy = f"update the driver, or delete .venv and run ./setup.sh, which chooses a torch that fits; or {on_cpu}"
        if self.unusable and named != []:
            rule = f"{'is not set' if named is None else 'names a GPU'}, and {self.unusable}"
        elif named is None and not seen and (listed := _listed_gpus()):  # days on a CPU are not what anyone meant
            rule = f"is not set, and torch sees none of this machine's GPUs ({', '.join(listed)})"
        elif seen < len(named or []):
            rule = f"names {len(named or [])}, of which torch sees {seen}"
            remedy = f"name GPUs that exist (nvidia-smi -L lists them), each once, or {on_cpu}"
        if rule:
            if torch.endswith("+cpu"):
                rule += f"; this torch ({torch}) was built for the CPU alone"
                remedy = f"delete .venv and run ./setup.sh without --extra-index-url; or {on_cpu}"
            raise UserError(Fault("the environment", rule, VARIABLE, os.environ.get(VARIABLE), remedy))
        if config.num_processes != "auto":
            most, what, remedy = seen, f"GPUs ({VARIABLE} is honoured)", ""
            if not seen:
                most, what = available_cores(), "cores, since this run trains on the CPU"
                remedy = f"; to try more all the same, slowly: {SHARE_CORES_NAME}=1 in the environment"
            if config.num_processes > most and (seen or not os.environ.get(SHARE_CORES_NAME)):
                rule = f"must be at most {most}, the number of {what}"
                raise UserError(config.fault("num_processes", rule, f"try {most} or auto{remedy}"))
            return [config.num_processes]
        if seen or config.tensor_parallel_size > 1:
            return [max(1, seen)]
        cores = max(1, available_cores() // threads(available_cores()))  # for so many threads each
        shared = [count for count in range(cores, 1, -1) if cores % count == 0]
        return [*(count for count in shared if batch_tokens >= count * MIN_PROCESS_TOKENS), 1]

    def precision(self, config: MachineSettings) -> Literal["bf16", "fp32", "fp8"]:
        """Return the configured precision; for ``auto`` bf16 where the device computes in it.

        Raises:
            UserError: a GPU does not compute in the precision.
        """
        if config.precision == "fp8" and self.gpu_names and not self.computes_fp8:
            rule = f"fp8 needs GPUs of Ada, Hopper or later (capability 8.9), not {', '.join(set(self.gpu_names))}"
            raise UserError(config.fault("precision", rule, "set precision: bf16"))
        return config.precision if config.precision != "auto" else "bf16" if self.computes_bf16 else "fp32"

    def text(self, num_processes: int) -> str:
        """Return the devices of `num_processes` training processes, for display."""
        if not self.gpu_names:
            num_cores, num_threads = plural(available_cores(), "core"), plural(threads(num_processes), "thread")
            return f"CPU, {num_cores}, {num_threads} a process"
        names, idle = Counter(self.gpu_names[:num_processes]), len(self.gpu_names) - num_processes
        device = "GPU, " + ", ".join(f"{number} × {name}" for name, number in names.items())
        return device + (f" ({idle} more not used)" if idle > 0 else "")

    def process_environment(self, processes: int) -> dict[str, str]:
        """Return environment variables that each training process needs before it loads torch."""
        # PYTHONSAFEPATH: a file of the current folder is not imported as a package of the same name.
        common = {PARENT_NAME: str(os.getpid()), "PYTHONSAFEPATH": "1"}
        # A thread that waits sleeps, and does not spin on cores that others need (docs/decisions.md).
        wanted = {_THREADS_NAME: str(threads(processes)), "OMP_WAIT_POLICY": "PASSIVE"}
        compiling = min(_MAX_COMPILE_THREADS, max(1, available_cores() // processes))
        wanted["TORCHINDUCTOR_COMPILE_THREADS"] = str(compiling)
        if self.gpu_names and not any(map(os.environ.get, _ALLOCATOR_NAMES)):  # else freed memory is left in holes
            wanted[_ALLOCATOR_NAMES[0]] = "expandable_segments:True"
        common |= {name: os.environ.get(name) or value for name, value in wanted.items()}
        if not self.gpu_names:
            return {**common, "DS_ACCELERATOR": "cpu", VARIABLE: ""}
        named = named_gpus() or [str(number) for number in range(processes)]
        return {**common, VARIABLE: ",".join(named[:processes])}

    def notes(self, config: MachineSettings) -> Iterator[str]:
        """Yield what Triton would miss, so that steps are slow (triton/runtime/build.py)."""
        if self.gpu_names and config.compile != "off":
            header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
            compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
            if not any(map(shutil.which, compilers)) or not header.exists():
                missing = f"no C compiler ({' or '.join(compilers)}) or no {header}"
                remedy = f"apt install gcc {header.parent.name}-dev"
                yield f"{missing}: nothing can be compiled, so steps take longer. On Ubuntu: {remedy}"


def devices() -> Devices:
    """Look up the devices. Importing torch takes a second: one that was built for the CPU alone is not asked."""
    unusable = ""
    if not (name := version("torch")).endswith("+cpu"):
        import torch
        from torch import cuda

        try:  # NVML counts GPUs also where their driver is too old for this torch
            gpus = [cuda.get_device_properties(index) for index in range(cuda.device_count())]
        except (RuntimeError, cuda.DeferredCudaCallError) as error:
            unusable = f"torch {name} for CUDA {torch.version.cuda} cannot use it ({str(error).partition('. ')[0]})"
        else:
            if gpus:
                computes_bf16 = cuda.is_bf16_supported(including_emulation=False)
                names, memory = tuple(gpu.name for gpu in gpus), min(gpu.total_memory for gpu in gpus)
                return Devices(names, memory, computes_bf16, all((gpu.major, gpu.minor) >= (8, 9) for gpu in gpus))
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    has_amx = "amx_bf16" in flags
    return Devices(computes_bf16=has_amx or "avx512_bf16" in flags, has_amx=has_amx, unusable=unusable)


def threads(num_processes: int) -> int:
    """Return the threads of each process on a CPU: OMP_NUM_THREADS, or an equal share of the cores."""
    wanted = os.environ.get(_THREADS_NAME, "").partition(",")[0].strip()  # `4,2` is for nested loops
    return (int(wanted) if wanted.isdecimal() else 0) or max(1, available_cores() // num_processes)


@cache
def _listed_gpus() -> list[str]:
    """Names of the GPUs that NVIDIA's driver lists, like ``GPU 0: NVIDIA H200 (UUID: GPU-1b…)``; none without it."""
    program = shutil.which("nvidia-smi") or shutil.which("/usr/lib/wsl/lib/nvidia-smi") or "nvidia-smi"
    try:  # a driver that sleeps takes a few seconds to wake up
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return re.findall(r"^GPU \d+: (.*?)\s*\(UUID:", done.stdout, re.MULTILINE)
