"""Activation checkpointing changes no bit of a gradient, and keeps less in memory."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import pytest
import torch
from shapes import shape_of

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import parallel
from zerokara.model.builder import build

MODES = ("off", "selective", "full")
assert set(MODES) == set(get_args(PretrainConfig.model_fields["activation_checkpointing"].annotation))


def gradients_and_kept_bytes(
    architecture: str, masked: bool, mode: str, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], int]:
    """The gradient of every parameter, and the bytes kept for the backward pass."""
    parallel.start_alone()
    kv_heads = 4 if architecture == "gpt2" else 2
    shape = shape_of(
        500, architecture=architecture, hidden_size=64, num_kv_heads=kv_heads, ffn_hidden_size=192, init_std=0.2
    )
    model = build(shape, dtype, activation_checkpointing=mode).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    ids = torch.randint(0, 500, (2, 32), generator=torch.Generator().manual_seed(1))
    segments = (ids < 50).cumsum(1) if masked else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        nats = model(ids, ids, None, segments)
    kept_bytes = sum(storage.nbytes() for storage in kept.values())
    nats.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, kept_bytes  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_gradients_are_equal_and_less_is_kept(architecture: str, masked: bool, dtype: torch.dtype) -> None:
    found = {mode: gradients_and_kept_bytes(architecture, masked, mode, dtype) for mode in MODES}
    gradients = {mode: gradient for mode, (gradient, _) in found.items()}
    for mode in ("selective", "full"):
        assert gradients[mode].keys() == gradients["off"].keys()
        for name, gradient in gradients["off"].items():
            assert gradient.abs().max() > 0, name
            assert torch.equal(gradients[mode][name], gradient), (mode, name)
    for more, less in pairwise(MODES):
        assert found[less][1] < 0.7 * found[more][1], (less, more)


def test_validation_recomputes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel.start_alone()
    model = build(shape_of(seq_len=16), activation_checkpointing="full")
    monkeypatch.setattr("zerokara.model.layers.checkpoint", None)
    with torch.no_grad():
        model(torch.zeros(1, 16, dtype=torch.int64))
    with pytest.raises(TypeError):
        model(torch.zeros(1, 16, dtype=torch.int64))
