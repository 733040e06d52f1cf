"""Activation checkpointing changes no bit of a gradient; tests/unit/training/test_memory.py has what it keeps."""

from typing import get_args

import pytest
import torch
from drawn_models import build
from shapes import shape_of

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import parallel

MODES = ("off", "selective", "full")
assert set(MODES) == set(get_args(PretrainConfig.model_fields["activation_checkpointing"].annotation))


def gradients(architecture: str, masked: bool, mode: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    parallel.start_alone()
    kv_heads = 4 if architecture == "gpt2" else 2
    shape = shape_of(
        500, architecture=architecture, hidden_size=64, num_kv_heads=kv_heads, ffn_hidden_size=192, init_std=0.2
    )
    model = build(shape, dtype, activation_checkpointing=mode).train()
    ids = torch.randint(0, 500, (2, 32), generator=torch.Generator().manual_seed(1))
    model(ids, ids, None, (ids < 50).cumsum(1) if masked else None).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_gradients_are_equal(architecture: str, masked: bool, dtype: torch.dtype) -> None:
    expected, *others = (gradients(architecture, masked, mode, dtype) for mode in MODES)
    for found in others:
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert gradient.abs().max() > 0, name
            assert torch.equal(found[name], gradient), name


def test_validation_recomputes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel.start_alone()
    model = build(shape_of(seq_len=16), activation_checkpointing="full")
    monkeypatch.setattr("zerokara.model.layers.checkpoint", None)
    with torch.no_grad():
        model(torch.zeros(1, 16, dtype=torch.int64))
    with pytest.raises(TypeError):
        model(torch.zeros(1, 16, dtype=torch.int64))
