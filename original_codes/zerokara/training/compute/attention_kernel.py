"""Which kernel `scaled_dot_product_attention` takes, as torch reports it."""

from __future__ import annotations

import torch

from zerokara.model.shapes import ModelShape


def attention_kernel(shape: ModelShape, precision: str, intra_document_masking: bool, device: torch.device) -> str:
    """Name the attention kernel of a training step, for people."""
    has_bias = shape.traits.positions == "relative"
    if device.type == "cpu":
        plain = "plain operations, because of the learned relative position bias, and "
        return f"attention by {plain if has_bias else ''}torch's flash kernel for CPUs"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    size = (1, shape.num_attn_heads, shape.seq_len, shape.head_dim)
    query = torch.empty(size, dtype=dtype, device=device)
    pairs = (1, 1, shape.seq_len, shape.seq_len)
    mask = torch.ones(pairs, dtype=torch.bool, device=device) if intra_document_masking else None
    if has_bias:
        mask = torch.zeros(pairs, dtype=dtype, device=device, requires_grad=True).expand(-1, size[1], -1, -1)
    asked = torch.backends.cuda.SDPAParams(query, query, query, mask, 0.0, mask is None, False)
    for name, can in (
        ("FlashAttention", torch.backends.cuda.can_use_flash_attention),
        ("cuDNN", torch.backends.cuda.can_use_cudnn_attention),
        ("the memory-efficient kernel", torch.backends.cuda.can_use_efficient_attention),
    ):
        if can(asked, False):
            return f"attention by {name}"
    return "attention by plain operations, slow and with the matrix of all scores: no fused kernel takes this shape"
