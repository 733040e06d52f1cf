"""The table of devices: by torch's names, and no name taken for another that it contains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zerokara.training.compute import devices


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


HELD = """
import psutil, torch
from zerokara.training.compute import devices
devices.{policy}()
before = psutil.Process().memory_info().rss
tensors = [torch.ones(2_000_000) for _ in range(50)]
del tensors[:-1]
print(psutil.Process().memory_info().rss - before)
"""


def test_freed_memory_is_kept_or_given_back() -> None:
    """49 of 50 tensors of 8 MB are freed; in a process of its own, since the policy cannot be taken back."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3] / "original_codes")}
    held = {}
    for policy in ("keep_freed_memory", "give_back_freed_memory"):
        command = [sys.executable, "-c", HELD.format(policy=policy)]
        held[policy] = int(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert held["keep_freed_memory"] > 300e6 and held["give_back_freed_memory"] < 100e6, held
