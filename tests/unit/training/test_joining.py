"""Joining the processes of a run: what each gets of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerokara.training.planning import processors
from zerokara.training.processes import joining

HELD = """
import psutil, torch
from zerokara.training.processes import joining
joining.keep_freed_memory({keeps})
before = psutil.Process().memory_info().rss
tensors = [torch.ones(2_000_000) for _ in range(50)]
del tensors[:-1]
print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_processes_share_the_cores_on_every_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under offload the optimizer's updates run on the cores beside a GPU."""
    given: list[int] = []

    def nothing(*_: Any, **__: Any) -> None:
        pass

    monkeypatch.setattr(joining, "local_device", lambda: torch.device(device))
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    for owner, name in (
        (torch.cuda, "set_device"), (torch.distributed, "new_group"), (torch.distributed, "get_rank"),
        (joining, "init_process_group"), (joining, "require_answers"), (joining.parallel, "start"),
        (joining, "secure_groups"), (joining, "keep_freed_memory"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, nothing)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(processors, "available_cores", lambda: 16)
    settings, forecast = SimpleNamespace(seed=1, tensor_parallel_size=1), SimpleNamespace(can_keep_freed_memory=True)
    plan: Any = SimpleNamespace(resolved=settings, processes_per_node=4, memory=forecast)
    joining.join(plan)
    assert given == [4]


def test_freed_memory_is_kept_or_given_back() -> None:
    """49 of 50 tensors of 8 MB are freed; in a process of its own, since the policy cannot be taken back."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3] / "original_codes")}
    held = {}
    for keeps in (True, False):
        command = [sys.executable, "-c", HELD.format(keeps=keeps)]
        held[keeps] = int(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert held[True] > 300e6 and held[False] < 100e6, held
