"""A bf16 model computes in fp32 as one that was loaded in fp32, and its pages leave memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import rounding
import torch
from torch.nn import functional

from zerokara.checkpoint.tensor_file import TensorWriter
from zerokara.huggingface import fp32_inference, page_release
from zerokara.huggingface.fp32_inference import Fp32Inference
from zerokara.huggingface.page_release import PageRelease
from zerokara.huggingface.stored_tensors import StoredTensors


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


def resident(path: Path) -> int:
    """Bytes of a file's pages that count as this process's memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split(" ")[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


@pytest.mark.parametrize(("kept_share", "most_layers"), [(0.0, 2), (0.5, 6)])
def test_pages_are_released_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_share: float, most_layers: int
) -> None:
    path = tmp_path / "model.safetensors"
    weights = {str(number): torch.randn(512, 512) for number in range(8)}
    with TensorWriter(path, dict.fromkeys(weights, (512, 512)), torch.float32) as writer:
        for name, tensor in weights.items():
            writer.write(name, tensor)
    tensors = StoredTensors(path)
    layers = [torch.nn.Linear(512, 512, bias=False) for _ in weights]
    for layer, name in zip(layers, weights, strict=True):
        layer.weight = torch.nn.Parameter(tensors[name], requires_grad=False)
    own = torch.nn.Linear(512, 512)  # not mapped: its memory must not be touched
    model = torch.nn.Sequential(*layers, own)
    rows = torch.randn(3, 512)
    must = model(rows)
    assert resident(path) >= 8 * 512 * 512 * 4

    monkeypatch.setattr(page_release, "RESIDENT_BYTES", 512 * 512 * 4)
    monkeypatch.setattr(page_release, "KEPT_SHARE", kept_share)
    PageRelease(model, tmp_path)
    for _ in range(2):
        assert torch.equal(model(rows), must)
        assert resident(path) <= most_layers * 512 * 512 * 4
