"""Activation checkpointing changes no bit of a gradient, and keeps no recomputed activation in memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from zerokara.model import parallel
from zerokara.model.megatron import build
from zerokara.model.recomputation import _RECOMPUTED
from zerokara.model.shapes import ModelShape

MODES = ("off", "selective", "full")


def gradients_and_kept_bytes(
    architecture: str, isolated: bool, mode: str, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], int]:
    """The gradient of every parameter, and the bytes that were kept for the backward pass."""
    parallel.start_alone()
    kv_heads = 4 if architecture == "gpt2" else 2
    shape = ModelShape(architecture, 2, 64, 4, kv_heads, 192, 32, 500, True, 1e4, 1e-5, 0.2)
    model = build(shape, dtype, activation_checkpointing=mode).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    ids = torch.randint(0, 500, (2, 32), generator=torch.Generator().manual_seed(1))
    segments = (ids < 50).cumsum(1) if isolated else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        nats = model(ids, ids, None, segments)
    kept_bytes = sum(storage.nbytes() for storage in kept.values())
    nats.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, kept_bytes  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_gradients_are_equal_and_less_is_kept(architecture: str, isolated: bool, dtype: torch.dtype) -> None:
    found = {mode: gradients_and_kept_bytes(architecture, isolated, mode, dtype) for mode in MODES}
    gradients = {mode: gradient for mode, (gradient, _) in found.items()}
    for mode in ("selective", "full"):
        assert gradients[mode].keys() == gradients["off"].keys()
        for name, gradient in gradients["off"].items():
            assert gradient.abs().max() > 0, name
            assert torch.equal(gradients[mode][name], gradient), (mode, name)
    for more, less in pairwise(MODES):
        assert found[less][1] < 0.7 * found[more][1], (less, more)


def test_a_validation_computes_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel.start_alone()
    shape = ModelShape("llama", 1, 32, 2, 2, 64, 16, 100, True, 1e4, 1e-5, 0.02)
    model = build(shape, activation_checkpointing="full")
    monkeypatch.setattr("zerokara.model.recomputation.checkpoint", None)
    with torch.no_grad():
        model(torch.zeros(1, 16, dtype=torch.int64))
    with pytest.raises(TypeError):
        model(torch.zeros(1, 16, dtype=torch.int64))
    assert set(_RECOMPUTED) == set(MODES) - {"off"}


def test_whole_runs_are_equal(train_runs: Callable) -> None:
    """Under the hooks of ZeRO 3, with tensor parallelism, and with documents isolated."""
    settings = {
        "stage3": {"zero_stage": 3},
        "tensors": {"zero_stage": 1, "tensor_parallel_size": 2, "intra_document_masking": True},
    }
    runs = {
        f"{name}_{mode}": {**of_run, "train_tokens": 6 * 8 * 32, "activation_checkpointing": mode}
        for name, of_run in settings.items()
        for mode in MODES
    }
    done = train_runs(runs, processes=2)
    for name in settings:
        off = done[f"{name}_off"].losses
        assert len(off) == 6 and off[-1] < off[0]
        for mode in ("selective", "full"):
            assert done[f"{name}_{mode}"].losses == off, mode
