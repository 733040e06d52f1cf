"""Attention with a learned bias: values and gradients are those of torch's plain attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from zerokara.model import biased_attention

B, H, S, T, E = 5, 3, 7, 9, 4


def inputs(num_queries: int = S, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(1)
    shapes = [(B, H, num_queries, E), (B, H, T, E), (B, H, T, E), (1, H, num_queries, T)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def with_gradients(out: Tensor, given: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), given, retain_graph=True)]


@pytest.mark.parametrize("samples_at_a_time", [1, 2, B])
@pytest.mark.parametrize("is_causal", [False, True])
def test_values_and_gradients_are_those_of_plain_attention(
    samples_at_a_time: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(biased_attention, "MAX_SCORES", samples_at_a_time * H * S * T)
    query, key, value, table = given = inputs()
    future = torch.ones(S, T, dtype=torch.bool).triu(1)
    bias = table.masked_fill(future, float("-inf")) if is_causal else table
    ours = with_gradients(biased_attention.attention(query, key, value, bias, 0.7), given)
    plain = with_gradients(scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=0.7), given)
    for found, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert plain[-1].abs().max() > 0.1  # there is a gradient to be missed


def test_a_wrong_gradient_would_be_seen() -> None:
    """Without the share of the row sums the gradient of the bias is another one."""
    query, key, value, bias = given = inputs()
    expected = with_gradients(scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0), given)[-1]
    probabilities = torch.softmax(query @ key.mT + bias, -1)
    weights = torch.linspace(-1, 1, B * H * S * E).view(B, H, S, E)
    broken = ((weights @ value.mT) * probabilities).sum(0, keepdim=True)
    assert (broken - expected).abs().max() > 0.1


def test_in_bf16_the_scores_are_in_fp32() -> None:
    given = inputs(dtype=torch.bfloat16)
    exact = [each.detach().double().requires_grad_() for each in given]
    query, key, value, bias = exact
    expected = with_gradients(scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0), exact)
    query, key, value, bias = given
    found = with_gradients(biased_attention.attention(query, key, value, bias, 1.0), given)
    for ours, plain in zip(found, expected, strict=True):
        assert (ours.double() - plain).norm() < 0.01 * plain.norm()


def test_it_serves_a_shared_bias_that_is_learned() -> None:
    _query, _, _, bias = inputs()
    assert biased_attention.serves(bias)
    assert not biased_attention.serves(bias.detach())
    assert not biased_attention.serves(bias.expand(B, H, S, T))
