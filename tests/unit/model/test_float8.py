"""Products in float8: values, gradients, what is not finite, zeros, sizes that do not fit, and compiled."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from drawn_models import build
from engines import random_batch
from shapes import shape_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear, silu

from zerokara.model import float8, parallel
from zerokara.model.float8 import Float8Product, product
from zerokara.model.layers import multiply_in_float8
from zerokara.model.shapes import is_layer_matrix

UNITS = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3, torch.bfloat16: 2**-9}
"""Rounding to the nearest changes a number by at most so much of it, while it is not among the smallest."""


@pytest.fixture
def factors() -> Iterator[list[Tensor]]:
    """Inputs [2, 24, 64], a weight [48, 64], a bias, and the gradient of the outputs: not contiguous, and tiny."""
    torch.manual_seed(3)
    shapes, sizes = [(24, 2, 64), (48, 64), (48,), (24, 2, 48)], [1.0, 0.02, 0.1, 1e-9]
    inputs, weight, bias, gradient = (
        torch.randn(s, dtype=torch.bfloat16) * z for s, z in zip(shapes, sizes, strict=True)
    )
    leaves = [inputs.transpose(0, 1), weight, bias]
    yield [*(leaf.requires_grad_() for leaf in leaves), gradient.transpose(0, 1)]


def rounded(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """An independent rounding to float8 with one scale for all, in double precision."""
    scale = exact.abs().max() / torch.finfo(dtype).max
    return (exact / scale).float().to(dtype).double() * scale


def test_values_and_gradients_are_products_of_rounded_factors(factors: list[Tensor]) -> None:
    leaves, gradient = factors[:3], factors[3]
    out = product(*leaves)
    found = [out, *torch.autograd.grad(out, leaves, gradient)]
    inputs, weight, bias, exact_gradient = (each.detach().double() for each in factors)
    x, w, g = (
        rounded(inputs, torch.float8_e4m3fn),
        rounded(weight, torch.float8_e4m3fn),
        rounded(exact_gradient, torch.float8_e5m2),
    )
    rows = [each.flatten(0, 1) for each in (x, g)]
    expected = [x @ w.T + bias, g @ w, rows[1].T @ rows[0], exact_gradient.sum((0, 1))]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.bfloat16
        # Twice: a product is rounded once in itself, and its sum with the bias again.
        torch.testing.assert_close(one.double(), other, rtol=2 * UNITS[torch.bfloat16], atol=1e-2 * other.std().item())
    # And so it is near what bf16 computes, but not it: three bits of mantissa are seen.
    plain = linear(*leaves)
    share = (out - plain).norm() / plain.norm()
    assert UNITS[torch.bfloat16] < share < UNITS[torch.float8_e4m3fn]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(factors: list[Tensor], bad: float) -> None:
    """So that the norm of the step is not finite either, and it is skipped."""
    inputs, weight, _, gradient = factors
    spoilt = inputs.detach().clone()
    spoilt[0, 0, 0] = bad
    assert not product(spoilt.requires_grad_(), weight).isfinite().any()
    worse = gradient.clone()
    worse[1, 2, 3] = bad
    for each in torch.autograd.grad(product(inputs, weight), (inputs, weight), worse):
        assert not each.isfinite().any()


def test_zeros_and_the_largest_numbers_are_exact(factors: list[Tensor]) -> None:
    _, weight, _, gradient = factors
    for value in (0.0, 3e38):
        inputs = torch.full((32, 64), value, dtype=torch.bfloat16, requires_grad=True)
        ones = torch.zeros_like(weight).fill_diagonal_(1).requires_grad_()
        out = product(inputs, ones)
        assert torch.equal(out, inputs[:, :48])
    nothing = torch.autograd.grad(product(factors[0], weight), (factors[0], weight), torch.zeros_like(gradient))
    assert all(torch.equal(each, torch.zeros_like(each)) for each in nothing)


@pytest.mark.parametrize("sizes", [(60, 48), (64, 40)])
def test_weights_that_a_gpu_does_not_take_are_in_bf16(sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    inner, outer = sizes
    monkeypatch.setattr(Float8Product, "apply", lambda *_: pytest.fail("float8 is tried"))
    inputs, weight = (
        torch.randn(size, dtype=torch.bfloat16, requires_grad=True) for size in ((32, inner), (outer, inner))
    )
    assert torch.equal(product(inputs, weight), linear(inputs, weight))


def test_tokens_are_filled_up(factors: list[Tensor]) -> None:
    """As a T5's may be, whose decoder has another length: not so few that they would be in bf16."""
    inputs, weight, bias, gradient = factors
    few, filled = inputs[:, :13], torch.cat([inputs[:, :13].flatten(0, 1), torch.zeros(6, 64)]).bfloat16()
    out, expected = product(few, weight, bias), product(filled, weight, bias)
    assert torch.equal(out.flatten(0, 1), expected[:26])
    rows = gradient[:, :13].flatten(0, 1)
    found = torch.autograd.grad(out, (inputs, weight), gradient[:, :13])
    wanted = torch.autograd.grad(expected, (inputs, weight), torch.cat([rows, torch.zeros(6, 48).bfloat16()]))
    assert all(map(torch.equal, found, wanted)) and found[1].abs().sum() > 0


@pytest.mark.parametrize("family", [{}, {"architecture": "t5", "seq_len": 29, "relative_attention_num_buckets": 8}])
def test_all_matrices_of_attention_and_dense_layers_are_in_float8_and_no_others(
    family: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel.start_alone()
    shape = shape_of(64, hidden_size=32, num_attn_heads=2, ffn_hidden_size=64, **family)
    model = build(shape, torch.bfloat16, seed=1)
    multiply_in_float8(model)
    weights = {weight.data_ptr(): name for name, weight in model.named_parameters()}
    seen, real = set[str](), Float8Product.apply

    def watched(inputs_MK: Tensor, weight_NK: Tensor) -> Tensor:
        seen.add(weights[weight_NK.data_ptr()])
        return real(inputs_MK, weight_NK)

    monkeypatch.setattr(Float8Product, "apply", watched)
    model(*random_batch(shape, 3, torch.Generator().manual_seed(1)))
    assert seen == {name for name, size in shape.parameter_shapes().items() if is_layer_matrix(name, size)}


def test_without_gradients_it_is_bf16_as_the_export_is(factors: list[Tensor]) -> None:
    with torch.no_grad():
        assert torch.equal(product(*factors[:3]), linear(*factors[:3]))


def multiplied(leaves: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """Factors and scales of a layer's three products: the outputs, the gradients of the inputs and of the weight."""
    calls, real = list[list[Tensor]](), float8._multiply

    def watched(*given: Tensor) -> Tensor:
        calls.append(list(given))
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(float8, "_multiply", watched)
        inputs, weight, gradient = leaves
        torch.autograd.grad(product(inputs, weight), (inputs, weight), gradient)
    return calls


ORDERS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "sum, first scale, second": lambda left, right, one, other: left @ right.T * one * other,
    "sum, second scale, first": lambda left, right, one, other: left @ right.T * other * one,
    "sum, both scales": lambda left, right, one, other: left @ right.T * (one * other),
    "each factor its scale": lambda left, right, one, other: (left * one) @ (right * other).T,
}
"""In which a processor may multiply: oneDNN with AMX does the first, torch without it the last."""


@pytest.mark.parametrize(
    "sizes",
    [(1, 1e-9, 0.02), (3e38, 1e-10, 1), (0.9, 1, 3e38), (1e18, 1e19, 1e19), (1e-12, 1e-12, 1e-15), (1e-28, 1, 3e38)],
)
def test_every_order_of_scales_is_right(
    sizes: tuple[float, float, float], factors: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the product of the factors' largest numbers is between 1e-30 and 3e38, and subnormal numbers are zeros."""
    largest = (
        each / each.abs().max() * size for each, size in zip((*factors[::3], torch.eye(48, 64)), sizes, strict=True)
    )
    inputs, gradient, weight = (each.detach().bfloat16().requires_grad_() for each in largest)
    x, g, w = (each.detach().double().flatten(0, -2) for each in (inputs, gradient, weight))
    x, g, w = rounded(x, float8.FORWARD), rounded(g, float8.GRADIENT), rounded(w, float8.FORWARD)
    products = multiplied([inputs, weight, gradient], monkeypatch)
    assert torch.set_flush_denormal(True)
    try:
        for given, expected in zip(products, (x @ w.T, g @ w, g.T @ x), strict=True):
            left, right = (each.float() for each in given if each.dim())
            scales = [each for each in given if not each.dim()]
            for order, multiply in ORDERS.items():
                found = multiply(left, right, scales[0], scales[-1]).bfloat16().double()
                bounds = {"rtol": 2 * UNITS[torch.bfloat16], "atol": 1e-6 * expected.abs().max().item()}
                assert torch.allclose(found, expected, **bounds), order
    finally:
        torch.set_flush_denormal(False)


def test_a_gpu_gets_the_layouts_and_sums_that_it_needs(factors: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLASLt takes the first factor by rows, the second by columns, and e5m2 in one of them alone.

    Torch checks what it would give to a GPU, of tensors without numbers.
    """
    calls, real = [], torch._scaled_mm

    def watched(left: Tensor, right: Tensor, *scales: Tensor, out_dtype: torch.dtype, use_fast_accum: bool) -> Tensor:
        calls.append((left.dtype, right.dtype, use_fast_accum))
        return real(left, right, *scales, out_dtype=out_dtype, use_fast_accum=use_fast_accum)

    products = multiplied([*factors[:2], factors[3]], monkeypatch)
    monkeypatch.setattr(torch, "_scaled_mm", watched)
    with FakeTensorMode():
        for left, right, scale in (
            [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in call] for call in products
        ):
            out = float8._multiply(left, right, scale)
            assert (out.shape, out.dtype) == ((len(left), len(right)), torch.bfloat16)
            with pytest.raises(RuntimeError, match="row_major"):
                float8._multiply(
                    torch.empty_strided(left.shape, (1, len(left)), dtype=left.dtype, device="cuda"), right, scale
                )
    e4m3, e5m2 = float8.FORWARD, float8.GRADIENT
    expected = [(e4m3, e4m3, True), (e5m2, e4m3, False), (e5m2, e4m3, False)]
    assert calls == [each for each in expected for _ in range(2)]


def test_compiled_is_eager(factors: list[Tensor]) -> None:
    inputs, weight, _, gradient = factors
    torch._dynamo.reset()

    def layer(inputs: Tensor, weight: Tensor) -> Tensor:
        return product(silu(inputs), weight)

    def computed(by: Callable[..., Tensor]) -> list[Tensor]:
        out = by(inputs, weight)
        return [out, *torch.autograd.grad(out, (inputs, weight), gradient)]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, computed(compiled), computed(layer)))
