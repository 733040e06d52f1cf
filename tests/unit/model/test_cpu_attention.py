"""Attention on a CPU, by blocks in bf16 and with a learned bias: values and gradients are those of torch's own."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from zerokara.model import cpu_attention
from zerokara.model.attention import intra_document_mask
from zerokara.model.cpu_attention import BiasedAttention, blocked_attention

B, H, S, T, E = 3, 4, 11, 16, 6


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "BLOCK", 4)  # the last one holds three queries


def inputs(key_heads: int = H, keys: int = S, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys, values and a bias."""
    torch.manual_seed(1)
    shapes = [(B, H, S, E), (B, key_heads, keys, E), (B, key_heads, keys, E), (1, H, S, keys)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def with_gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves, retain_graph=True)]


def documents() -> Tensor:
    mask_B1SS = intra_document_mask(torch.tensor([[0] * 4 + [1] * 7, [0] * 11, [0] + [1] * 5 + [2] * 5]))
    return mask_B1SS


@pytest.mark.parametrize("max_kept", [0, 1 << 20], ids=["computed again", "kept"])
@pytest.mark.parametrize("max_scores", [1, 100, 1 << 20])
@pytest.mark.parametrize("key_heads", [H, 2])
@pytest.mark.parametrize("kind", ["causal", "documents", "all"])
def test_blocks_are_plain_attention(
    kind: str, key_heads: int, max_scores: int, max_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_attention, "MAX_SCORES", max_scores)
    monkeypatch.setattr(cpu_attention, "MAX_KEPT", max_kept)
    leaves = inputs(key_heads, keys=T if kind == "all" else S)[:3]
    mask = documents() if kind == "documents" else None
    ours = blocked_attention(*leaves, kind != "all", 0.7, mask)
    plain = scaled_dot_product_attention(
        *leaves, attn_mask=mask, is_causal=kind == "causal", scale=0.7, enable_gqa=True
    )
    for found, expected in zip(with_gradients(ours, leaves), with_gradients(plain, leaves), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_mask_off_by_one_would_be_seen() -> None:
    mask = documents()
    shifted = mask.roll(1, dims=2) | torch.eye(S, dtype=torch.bool)
    right, wrong = (blocked_attention(*inputs()[:3], True, None, each) for each in (mask, shifted))
    assert (right - wrong).abs().max() > 0.1


@pytest.mark.parametrize("samples_at_a_time", [1, 2, B])
@pytest.mark.parametrize("kind", ["all", "causal", "masked"])
def test_a_bias_is_plain_attention_with_one(samples_at_a_time: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "MAX_SCORES", samples_at_a_time * H * S * T)
    query, key, value, table = leaves = inputs(keys=T)
    future = torch.ones(S, T, dtype=torch.bool).triu(1)
    bias = table.masked_fill(future, float("-inf")) if kind == "causal" else table
    mask = torch.rand(B, 1, S, T) < 0.7 if kind == "masked" else None
    ours = with_gradients(BiasedAttention.apply(query, key, value, bias, 0.7, mask), leaves)
    whole = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    plain = with_gradients(scaled_dot_product_attention(query, key, value, attn_mask=whole, scale=0.7), leaves)
    for found, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert plain[-1].abs().max() > 0.1  # there is a gradient to be missed


def test_in_bf16_blocks_are_about_as_near_to_the_truth_as_torchs_own() -> None:
    leaves = inputs(dtype=torch.bfloat16)[:3]
    exact = [each.detach().double().requires_grad_() for each in leaves]
    expected = with_gradients(scaled_dot_product_attention(*exact, is_causal=True), exact)
    flash = with_gradients(scaled_dot_product_attention(*leaves, is_causal=True), leaves)
    ours = with_gradients(blocked_attention(*leaves, is_causal=True), leaves)
    for found, other, truth in zip(ours, flash, expected, strict=True):
        assert (found.double() - truth).norm() < max(2 * (other.double() - truth).norm(), 0.005 * truth.norm())


def test_in_bf16_the_scores_with_a_bias_are_in_fp32() -> None:
    leaves = inputs(dtype=torch.bfloat16)
    exact = [each.detach().double().requires_grad_() for each in leaves]
    expected = with_gradients(scaled_dot_product_attention(*exact[:3], attn_mask=exact[3], scale=1.0), exact)
    for ours, plain in zip(with_gradients(BiasedAttention.apply(*leaves, 1.0, None), leaves), expected, strict=True):
        assert (ours.double() - plain).norm() < 0.01 * plain.norm()
