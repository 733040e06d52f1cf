"""What megatron-core 0.16.1 needs to run without a GPU. Nothing here is used where there is one.

Each line names the upstream line that it answers; it can go when that line asks torch for the device instead.
"""

from __future__ import annotations

import torch


def prepare() -> None:
    """Make megatron-core build and run on the CPU; call before a module of it is built."""
    if torch.cuda.is_available():
        return
    # megatron/core/models/common/embeddings/rotary_pos_embedding.py:78 and :162, tensor_parallel/mappings.py:91, :141,
    # :181 place tensors on `torch.cuda.current_device()`.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
