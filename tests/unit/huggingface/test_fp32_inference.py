"""A bf16 model computes in fp32 as one that was loaded in fp32."""

from __future__ import annotations

import pytest
import rounding
import torch
from torch.nn import functional

from zerokara.huggingface import fp32_inference
from zerokara.huggingface.fp32_inference import Fp32Inference


def test_products_look_ups_and_norms_are_those_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp32_inference, "BLOCK_ELEMENTS", 24)  # three rows of eight at a time, and one left over
    generator = torch.Generator().manual_seed(1)
    weight, bias = (torch.randn(size, generator=generator).bfloat16() for size in ((10, 8), (10,)))
    table, scale = (torch.randn(size, generator=generator).bfloat16() for size in ((5, 8), (8,)))
    tokens = torch.tensor([[1, 4, 2]])
    rows = functional.embedding(tokens, table.float())
    with Fp32Inference():
        assert torch.equal(functional.embedding(tokens, table), rows)
        linear = functional.linear(rows, weight, bias)
        transposed = torch.addmm(bias, rows[0], weight.t())
        norm = functional.layer_norm(rows, (8,), weight=scale, bias=scale)
        mixed = rows @ weight.t()
        scaled = scale * rows
    wide = functional.linear(rows, weight.float(), bias.float())
    for found, must in (
        (linear, wide),
        (transposed, wide[0]),
        (mixed, functional.linear(rows, weight.float())),
        (norm, functional.layer_norm(rows, (8,), scale.float(), scale.float())),
        (scaled, scale.float() * rows),
    ):
        assert found.dtype == torch.float32
        rounding.assert_same_tensor(found, must)
    with pytest.raises(RuntimeError, match="dtype"):
        functional.linear(rows, weight)
