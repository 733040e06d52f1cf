"""Attention by blocks of queries: values and gradients are those of torch's own attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from zerokara.model import blocked_attention
from zerokara.model.attention import intra_document_mask

B, H, S, E = 3, 4, 11, 6


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_attention, "BLOCK", 4)  # the last one holds three queries


def inputs(key_heads: int = H, keys: int = S, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(1)
    shapes = [(B, H, S, E), (B, key_heads, keys, E), (B, key_heads, keys, E)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def with_gradients(out: Tensor, given: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), given)]


def documents() -> Tensor:
    _, mask_B1SS = intra_document_mask(torch.tensor([[0] * 4 + [1] * 7, [0] * 11, [0] + [1] * 5 + [2] * 5]))
    return mask_B1SS


@pytest.mark.parametrize("max_kept", [0, 1 << 20], ids=["computed again", "kept"])
@pytest.mark.parametrize("max_scores", [1, 100, 1 << 20])
@pytest.mark.parametrize("key_heads", [H, 2, 1])
@pytest.mark.parametrize("kind", ["causal", "documents", "all"])
def test_values_and_gradients_are_those_of_plain_attention(
    kind: str, key_heads: int, max_scores: int, max_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked_attention, "MAX_SCORES", max_scores)
    monkeypatch.setattr(blocked_attention, "MAX_KEPT", max_kept)
    query, key, value = given = inputs(key_heads, keys=S if kind != "all" else S + 5)
    mask = documents() if kind == "documents" else None
    ours = blocked_attention.attention(query, key, value, kind != "all", 0.7, mask)
    plain = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=kind == "causal", scale=0.7, enable_gqa=True
    )
    for found, expected in zip(with_gradients(ours, given), with_gradients(plain, given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_mask_off_by_one_would_be_seen() -> None:
    query, key, value = inputs()
    mask = documents()
    shifted = mask.roll(1, dims=2) | torch.eye(S, dtype=torch.bool)
    right, wrong = (blocked_attention.attention(query, key, value, True, None, each) for each in (mask, shifted))
    assert (right - wrong).abs().max() > 0.1


def test_in_bf16_it_is_about_as_near_to_the_truth_as_torchs_own() -> None:
    given = inputs(dtype=torch.bfloat16)
    exact = [each.detach().double().requires_grad_() for each in given]
    expected = with_gradients(scaled_dot_product_attention(*exact, is_causal=True), exact)
    flash = with_gradients(scaled_dot_product_attention(*given, is_causal=True), given)
    ours = with_gradients(blocked_attention.attention(*given, is_causal=True), given)
    for found, other, truth in zip(ours, flash, expected, strict=True):
        assert (found.double() - truth).norm() < max(2 * (other.double() - truth).norm(), 0.005 * truth.norm())


def test_it_serves_bf16_on_a_cpu() -> None:
    query = inputs()[0]
    assert not blocked_attention.serves(query) and blocked_attention.serves(query.bfloat16())
    assert not blocked_attention.serves(query.bfloat16().to("meta"))


@pytest.mark.parametrize("is_causal", [True, False])
def test_only_few_probabilities_are_kept(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_attention, "MAX_KEPT", 2 * 2 * S * S)

    def kept(repeats: int) -> int:
        query = torch.randn(2, 2 * repeats, S, E, dtype=torch.bfloat16, requires_grad=True)
        key = torch.randn(2, 2, S, E, dtype=torch.bfloat16)
        sizes: list[int] = []

        def pack(saved: Tensor) -> Tensor:
            sizes.append(saved.numel())
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            blocked_attention.attention(query, key, key, is_causal)
        return sum(sizes) - query.numel() - 2 * key.numel()

    assert kept(1) == (4 * (4 * 4 + 4 * 8 + 3 * 11) if is_causal else 4 * S * S)
    assert kept(2) == 0  # too many
