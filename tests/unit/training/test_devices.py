"""The table of devices: by torch's names, and no name taken for another that it contains."""

from __future__ import annotations

import resource

import pytest
import torch

from zerokara.training import devices


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX A6000", 155),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 3090 Ti", 80),
        ("NVIDIA GeForce RTX 4090", 165),
        ("AMD Instinct MI300X", 1307),
        ("AMD Instinct MI250X", 192),
    ],
)
def test_peaks_by_name(name: str, teraflops: int) -> None:
    assert devices.peak_of(name) == teraflops * 1e12


@pytest.mark.parametrize("name", ["Tesla V100-SXM2-32GB", "Tesla T4", "NVIDIA RTX A1000", "NVIDIA RTX A4000", ""])
def test_what_is_not_known_is_not_guessed(name: str) -> None:
    assert devices.peak_of(name) is None


def test_a_cpu_has_no_peak_in_the_table() -> None:
    assert devices.peak_flops(torch.device("cpu")) is None


def test_freed_memory_is_kept() -> None:
    """A tensor made again in the memory of the last one asks the system for no pages."""
    devices.keep_freed_memory()
    faults = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(8_000_000)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert faults[-1] < 32_000_000 / 4096 / 10, faults
