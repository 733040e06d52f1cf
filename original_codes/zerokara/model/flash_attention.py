"""FlashAttention 3 or 4 in place of torch's own (2), where one is installed that serves the model.

torch's registry (2.13, torch/nn/attention/_fa3.py and _fa4.py, prototypes) puts their kernels behind
`scaled_dot_product_attention` and `varlen_attn`. They are tried before the first step, and cuDNN's kernel, which torch
prefers on Hopper and Blackwell, is turned off for them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection

import torch
from torch.nn.functional import scaled_dot_product_attention

from zerokara.model.attention import variable_length_attention

MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}
"""What is imported of each, by its name in torch's registry."""


def choice(installed: Collection[str], capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> str | None:
    """Return the kernels' name in torch's registry; None stands for torch's own.

    FlashAttention 3 is written for Hopper, and serves heads of up to 256 there. 4 serves Hopper and data-center
    Blackwell (flash_attn/cute/interface.py, `_validate_head_dims`): up to 128 on both.
    """
    if dtype != torch.bfloat16 or head_dim % 8:
        return None
    if "FA3" in installed and capability[0] == 9 and head_dim <= 256:
        return "FA3"
    return "FA4" if "FA4" in installed and capability[0] in (9, 10) and head_dim <= 128 else None


def start(head_dim: int, dtype: torch.dtype, device: torch.device, log: Callable[[str], None]) -> None:
    """Let attention on a GPU use what `choice` names, if it runs."""
    if device.type != "cuda":
        return
    installed = [name for name, module in MODULES.items() if _is_installed(module)]
    name = choice(installed, torch.cuda.get_device_capability(device), dtype, head_dim)
    if name is None:
        return
    from torch.nn import attention

    try:
        attention.activate_flash_attention_impl(name)
        torch.backends.cuda.enable_cudnn_sdp(False)
        _try(head_dim, dtype, device)
    except Exception as error:  # whatever a prototype, or what it compiles, dislikes
        if isinstance(error, torch.OutOfMemoryError):
            raise
        torch.backends.cuda.enable_cudnn_sdp(True)
        if attention.current_flash_attention_impl():
            attention.restore_flash_attention_impl()
        log(f"attention: {MODULES[name]} is installed and does not run, torch's kernels do: {error!r}")
    else:
        log(f"attention: FlashAttention {name[-1]} ({MODULES[name]}), cuDNN's kernel is off")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # its package is missing, or was built for another torch
        return False


def _try(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compute forward and backward, of whole sequences and of documents."""
    heads_BSHE = torch.ones(1, 128, 2, head_dim, dtype=dtype, device=device, requires_grad=True)
    heads_BHSE = heads_BSHE.transpose(1, 2)
    offsets_N1 = torch.tensor([0, 32, 128], dtype=torch.int32, device=device)
    whole = scaled_dot_product_attention(heads_BHSE, heads_BHSE, heads_BHSE, is_causal=True)
    parts = variable_length_attention(heads_BSHE, heads_BSHE, heads_BSHE, offsets_N1, None)
    (whole.square().sum() + parts.square().sum()).backward()
