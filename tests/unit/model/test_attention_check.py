"""Attention whose gradients are wrong is refused before a run learns from it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shapes import shape_of
from torch import Tensor

from zerokara.base.errors import RunError
from zerokara.model import attention_check
from zerokara.model.attention import FusedAttention
from zerokara.model.attention_check import check_attention

SHAPES = {
    "grouped": {"hidden_size": 128, "num_attn_heads": 4, "num_kv_heads": 2, "seq_len": 96},
    "t5": {"architecture": "t5", "hidden_size": 64, "num_attn_heads": 2, "num_kv_heads": 2, "seq_len": 48},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("with_documents", [True, False])
def test_what_this_processor_computes_is_right(name: str, dtype: torch.dtype, with_documents: bool) -> None:
    check_attention(shape_of(**SHAPES[name]), torch.empty((), dtype=dtype), with_documents)


def broken(change: Callable[[Tensor], Tensor], which: int) -> type[FusedAttention]:
    """Attention that gives another gradient for its argument `which`, and the right values."""

    class Broken(FusedAttention):
        def forward(self, *heads: Tensor | None, **_: Any) -> Tensor:
            arguments = list(heads)
            wrong = arguments[which]
            assert wrong is not None
            arguments[which] = wrong.view_as(wrong)
            arguments[which].register_hook(change)
            return super().forward(*arguments)  # type: ignore[arg-type]

    return Broken


@pytest.mark.parametrize(
    ("name", "which", "change", "told"),
    [
        ("grouped", 0, lambda gradient: gradient * float("nan"), "queries"),
        ("grouped", 1, lambda gradient: gradient.roll(1, 0), "keys"),
        ("grouped", 2, lambda gradient: gradient * 1.05, "values"),
        ("t5", 4, lambda gradient: gradient * 0, "position bias"),
    ],
)
def test_a_wrong_gradient_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, which: int, change: Callable[[Tensor], Tensor], told: str
) -> None:
    monkeypatch.setattr(attention_check, "FusedAttention", broken(change, which))
    with pytest.raises(RunError, match=told):
        check_attention(shape_of(**SHAPES[name]), torch.empty(()), with_documents=False)


def test_attention_across_documents_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unmasked(FusedAttention):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
            return super().forward(query, key, value, None)

    monkeypatch.setattr(attention_check, "FusedAttention", Unmasked)
    check_attention(shape_of(**SHAPES["grouped"]), torch.empty(()), with_documents=False)
    with pytest.raises(RunError, match="within documents"):
        check_attention(shape_of(**SHAPES["grouped"]), torch.empty(()), with_documents=True)
