"""Joining the processes of a run: what each gets of the machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zerokara.training.planning import cores
from zerokara.training.processes import joining


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_processes_share_the_cores_on_every_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under offload the optimizer's updates run on the cores beside a GPU."""
    given: list[int] = []

    def nothing(*_: Any, **__: Any) -> None:
        pass

    monkeypatch.setattr(joining.devices, "local_device", lambda: torch.device(device))
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    for owner, name in (
        (torch.cuda, "set_device"), (torch.distributed, "new_group"), (torch.distributed, "get_rank"),
        (joining, "init_process_group"), (joining, "require_answers"), (joining, "set_timeouts"),
        (joining.parallel, "start"), (joining.authentication, "authenticate"),
        (joining.devices, "keep_freed_memory"), (joining.devices, "give_back_freed_memory"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, nothing)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "available_cores", lambda: 16)
    joining.join(processes_here=4, tensor_parallel_size=1, seed=1, keeps_freed_memory=True)
    assert given == [4]
