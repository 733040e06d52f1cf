"""The default process group of torch.distributed, for the processes that the launcher started."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed

TIMEOUT = datetime.timedelta(minutes=30)
"""How long a collective waits for the slowest process: one may be hashing a checkpoint, or waiting for the disk."""


def init_process_group(device: torch.device, init_method: str | None = None) -> None:
    """Join the processes that the launcher started (RANK, WORLD_SIZE), at `init_method`; once only.

    Without `init_method`, at MASTER_ADDR and MASTER_PORT, as torchrun has it. A lone process opens no port.
    """
    if torch.distributed.is_initialized():
        return
    is_cuda = device.type == "cuda"
    backend = "nccl" if is_cuda else "gloo"
    if os.environ.get("WORLD_SIZE") == "1":
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=TIMEOUT)
        return
    place: dict[str, Any] = {"device_id": device} if is_cuda else {}
    if init_method:
        place |= {
            "init_method": init_method,
            "rank": int(os.environ["RANK"]),
            "world_size": int(os.environ["WORLD_SIZE"]),
        }
    torch.distributed.init_process_group(backend, timeout=TIMEOUT, **place)
