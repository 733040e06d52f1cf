"""Hidden states that lie as on a GPU give the same numbers, and attention copies none of them."""

from typing import Any

import flash
import pytest
import rounding
import torch
from drawn_models import build
from shapes import shape_of
from torch import Tensor
from unit.model.dispatched import Dispatched

from zerokara.config.engine import OptimSettings
from zerokara.model import attention, cpu_attention, layers

BATCH, LENGTH, HIDDEN = 3, 24, 64
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3, grouped": {"architecture": "qwen3", "num_kv_heads": 2},
    "gpt2": {"architecture": "gpt2"},
    "mixtral": {"architecture": "mixtral", "num_experts": 4},
    "t5": {"architecture": "t5"},
}
COUNTED = "llama", "gpt2", "mixtral"
"""Their copies are counted, without those of dropout."""


def ids(seed: int) -> Tensor:
    return torch.randint(4, 300, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def computed(name: str, documents: str, batch_first: bool) -> tuple[list[Tensor], list[torch.Size]]:
    """Loss, gradients and logits of one position; and the sizes of copies that are no smaller than hidden states."""
    layers.is_batch_first = lambda _: batch_first
    shape = shape_of(num_layers=1, hidden_size=HIDDEN, num_attn_heads=4, seq_len=LENGTH, **MODELS[name])
    settings = OptimSettings(
        dropout=0.0 if name in COUNTED else 0.1, router_aux_loss_coef=0.3, router_z_loss_coef=0.2,
        expert_capacity_factor=1.0,
    )  # fmt: skip
    model = build(shape, seed=1, settings=settings).train()
    segments = (ids(3) < 40).cumsum(1)
    segments[:, 0] = 0
    offsets = torch.tensor([0, 5, LENGTH, 2 * LENGTH, 2 * LENGTH + 7, 3 * LENGTH], dtype=torch.int32)
    arguments: list[Any] = [ids(1), ids(2), (ids(3) < 250).float(), torch.arange(BATCH)]
    if shape.traits.is_encoder_decoder:
        arguments += [ids(2), *([segments, segments] if documents else [])]
    elif documents:
        arguments += [segments, offsets if documents == "offsets" else None, segments[:, -1]]
    with Dispatched() as seen:
        nats = model(*arguments)
        nats.backward()
    with torch.no_grad():
        decoder = {"decoder_input_ids_BT": ids(2)} if shape.traits.is_encoder_decoder else {}
        logits = model(ids(1), at_B=torch.arange(BATCH), **decoder)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    copies = [size for name, size in seen.made if name == "aten::clone" and size.numel() >= BATCH * LENGTH * HIDDEN]
    return [nats.detach(), logits, *gradients], copies


@pytest.mark.parametrize(
    ("name", "documents"),
    [
        ("llama", ""), ("llama", "offsets"), ("gpt2", "mask"), ("mixtral", "mask"), ("qwen3, grouped", "offsets"),
        ("t5", "mask"),
    ],
)  # fmt: skip
def test_batch_first_is_the_same_and_copies_nothing(monkeypatch: pytest.MonkeyPatch, name: str, documents: str) -> None:
    flash.install()
    monkeypatch.setattr(layers, "is_batch_first", layers.is_batch_first)
    monkeypatch.setattr(cpu_attention, "serves", lambda _: False)
    monkeypatch.setattr(attention, "has_variable_length_kernel", lambda weight, head_dim: True)
    (expected, copied_before), (found, copied) = (computed(name, documents, each) for each in (False, True))
    rounding.assert_same_loss(found[0].item(), expected[0].item())
    for one, other in zip(found[1:], expected[1:], strict=True):
        rounding.assert_same_tensor(one, other)
    if name in COUNTED:
        assert copied == [] and len(copied_before) >= (8 if documents == "offsets" else 2), copied_before
    elif name != "t5":  # a CPU's kernel for a learned bias makes copies of its own
        queries = BATCH, LENGTH, 2, HIDDEN // 2  # megatron-core's, of grouped heads
        assert {tuple(size) for size in copied} == {queries}
