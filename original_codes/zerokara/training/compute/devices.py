"""What a device can do: the peak of its matrix products, for the share that training reaches (MFU); its memory."""

from __future__ import annotations

import ctypes
import os
import re
import resource

import torch
from torch import Tensor

PEAK_BF16_FLOPS = {
    # NVIDIA: the datasheet of each; those that state sparse numbers, halved.
    "A100": 312e12,
    "A800": 312e12,
    "H100": 989e12,  # SXM
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H800": 989e12,
    "H20": 148e12,
    "GH200": 989e12,
    "H200": 989e12,  # SXM
    "H200 NVL": 835e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "A10": 125e12,
    "A10G": 70e12,
    "A30": 165e12,
    "A40": 150e12,
    "L4": 121e12,
    "L40": 181e12,
    "L40S": 362e12,
    "RTX A6000": 155e12,
    "RTX 6000 Ada": 364e12,
    # The architecture whitepapers of Ampere GA102, Ada and Blackwell, with fp32 accumulation, as training has it.
    "RTX 3090": 71e12,
    "RTX 3090 Ti": 80e12,
    "RTX 4080": 97e12,
    "RTX 4090": 165e12,
    "RTX 5080": 113e12,
    "RTX 5090": 210e12,
    # AMD: the datasheet of each; torch shows each half of an MI250 as a device of its own.
    "MI210": 181e12,
    "MI250": 181e12,
    "MI250X": 192e12,
    "MI300A": 981e12,
    "MI300X": 1307e12,
    "MI325X": 1307e12,
}
"""Dense bf16 operations a second, by words of the name that torch gives. V100, T4 and older have no bf16."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Source: glibc's malloc.h."""


def local_device() -> torch.device:
    """The device of this process, by LOCAL_RANK."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 operations a second, or None for a device that is not in the table."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    """Dense bf16 operations a second of the device with this name: of the entry with the most of its words."""
    fitting = [part for part in PEAK_BF16_FLOPS if re.search(rf"\b{re.escape(part)}\b", name)]
    return PEAK_BF16_FLOPS[max(fitting, key=len)] if fitting else None


def gpu_memory(device: torch.device) -> int | None:
    """Bytes of a GPU's memory; None for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def peak_memory(device: torch.device) -> int:
    """Most bytes that this process has held so far: of the GPU's memory, or of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read(numbers: Tensor) -> list[float]:
    """Return numbers of the device; the host waits until it has done all that it was given."""
    values: list[float] = numbers.tolist()
    return values


def keep_freed_memory() -> None:
    """On a CPU, let freed memory stay with this process for its next tensor, as torch does on a GPU.

    glibc gives large pieces back at once; to get them again the system clears each page, which for a tensor takes as
    long as a pass over it, or ten: a training step of 40M parameters took 1.4 times as long. The price is holes that
    nothing fills, a third more memory there. Elsewhere than with glibc nothing happens.
    """
    _set_malloc(_M_TRIM_THRESHOLD, -1)
    _set_malloc(_M_MMAP_THRESHOLD, 2**30)


def give_back_freed_memory() -> None:
    """On a CPU, give large pieces back at once: this process holds what it uses, and is slower."""
    _set_malloc(_M_MMAP_THRESHOLD, 2**20)


def _set_malloc(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)
