"""What a device can do: the peak of its matrix products, for the share of it that training reaches (MFU)."""

from __future__ import annotations

import resource

import torch

PEAK_BF16_FLOPS = {
    "A100": 312e12,  # NVIDIA A100 datasheet
    "H100 80GB HBM3": 989e12,  # NVIDIA H100 datasheet, SXM
    "H100 PCIe": 756e12,  # the same, PCIe
    "H200": 989e12,  # NVIDIA H200 datasheet
    "L40S": 362e12,  # NVIDIA L40S datasheet
    "RTX 4090": 165e12,  # NVIDIA Ada architecture whitepaper, with fp32 accumulation
}
"""Dense bf16 operations a second, by a part of the name that torch gives."""


def local_device(local_rank: int) -> torch.device:
    """The device of a training process."""
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 operations a second, or None for a device that is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_BF16_FLOPS.items() if part in name), None)


def peak_memory(device: torch.device) -> int:
    """Most bytes that this process has held so far: of the GPU's memory, or of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
