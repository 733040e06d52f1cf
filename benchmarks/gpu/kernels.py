"""Which kernels of a GPU are right, and what they cost apart from speed: ``python -m benchmarks.gpu.kernels [--tiny]``.

A JSON object on a line for each fact: of each kernel of attention the errors of its gradients beside plain operations
in fp32, and the milliseconds of a first call at a new length, which generation pays at every token; of the product that
the loss adds up in fp32 its error and what it saves; TFLOP/s of the products of a step, by size of model.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.facts import a_device, rate, short

CASES = {
    "heads of 64": (4, 12, 12, 2048, 64), "heads of 128": (2, 16, 16, 2048, 128), "grouped": (2, 16, 4, 2048, 128),
    "masked": (1, 2, 2, 704, 64), "an odd length": (2, 4, 4, 700, 64),
}  # fmt: skip
"""Sequences, heads, kv heads, length, size of a head. The masked one is that of pytorch issue 196678, NaN in the
gradient of queries whose scores are far below 0: it is near 0 there, and what is told is whether it has numbers."""
PRODUCTS = {
    "125m": (65536, 768, 2048),
    "350m": (32768, 1024, 2816),
    "1.3b": (16384, 2048, 5504),
    "7b": (8192, 4096, 11008),
}
"""Tokens of a micro batch, hidden and feed-forward size."""


def main() -> None:
    """Command line."""
    tiny = "--tiny" in sys.argv
    kernels = {
        "cuDNN": SDPBackend.CUDNN_ATTENTION, "Flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }  # fmt: skip
    for fact in (*gradients(kernels, tiny), *new_lengths(kernels, tiny), *loss_product(tiny), *products(tiny)):
        print(json.dumps(fact, ensure_ascii=False), flush=True)


def gradients(kernels: dict[str, SDPBackend], tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the relative errors of the gradients of queries, keys and values."""
    for case, (batch, heads, kv_heads, length, size) in CASES.items():
        length = 64 if tiny else length
        counts = heads, kv_heads, kv_heads
        drawn = [torch.randn(batch, count, length, size, device=a_device()).bfloat16() for count in counts]
        mask = None
        if case == "masked":
            mask = torch.ones(length, length, dtype=torch.bool, device=a_device()).tril()
            for each, first in zip(drawn[:2], (1.0, -120 * math.sqrt(size)), strict=True):
                each.mul_(0.1)[..., 0] = first
        expected = _gradients([each.float() for each in drawn], mask, SDPBackend.MATH)
        found: dict[str, Any] = {}
        for name, kernel in kernels.items():
            try:
                got = _gradients(drawn, mask, kernel)
                errors = ((one.float() - other).norm() / other.norm() for one, other in zip(got, expected, strict=True))
                finite = [bool(each.isfinite().all()) for each in got]
                found[name] = finite if case == "masked" else [float(f"{error:.2g}") for error in errors]
            except Exception as error:  # it is the fact
                found[name] = short(error)
        yield {"gradients": case, **found}


def _gradients(drawn: list[Tensor], mask: Tensor | None, kernel: SDPBackend) -> tuple[Tensor, ...]:
    leaves = [each.detach().requires_grad_() for each in drawn]
    with sdpa_kernel(kernel):
        out = scaled_dot_product_attention(*leaves, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return torch.autograd.grad(out, leaves, drawn[0].roll(1, dims=-1))


def new_lengths(kernels: dict[str, SDPBackend], tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the milliseconds of a first call at a length, the median of twelve."""
    found: dict[str, Any] = {}
    for name, kernel in kernels.items():
        took = []
        try:
            for length in range(65, 67 if tiny else 77):
                query = torch.randn(2, 12, length, 64, device=a_device()).bfloat16()
                started = time.perf_counter()
                with torch.no_grad(), sdpa_kernel(kernel):
                    scaled_dot_product_attention(query, query, query, is_causal=True).sum().item()
                took.append(1000 * (time.perf_counter() - started))
            found[name] = round(statistics.median(took), 3)
        except Exception as error:  # it is the fact
            found[name] = short(error)
    yield {"new length, ms": found}


def loss_product(tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the error of a product that is added in fp32 (`model.loss`), and TFLOP/s with and without."""
    rows, vocabulary = (64, 512) if tiny else (4096, 49536)
    for width in (64,) if tiny else (768, 2048):
        gradient, hidden = (torch.randn(rows, each, device=a_device()).bfloat16() for each in (vocabulary, width))
        total, work = torch.ones(vocabulary, width, device=a_device()), 2 * rows * vocabulary * width / 1e12
        expected, fact = 1 + gradient.float().t() @ hidden.float(), {}

        def at_once(total: Tensor = total, gradient: Tensor = gradient, hidden: Tensor = hidden) -> None:
            torch.addmm(total, gradient.t(), hidden, out_dtype=torch.float32, out=total)

        def in_two(total: Tensor = total, gradient: Tensor = gradient, hidden: Tensor = hidden) -> None:
            total += gradient.t() @ hidden

        try:
            at_once()
            fact = {"error": float((total - expected).norm() / expected.norm())}
        except Exception as error:  # it is the fact
            fact = {"error": short(error)}
        yield {
            "loss product": width,
            **fact,
            "at once": rate(at_once, work, "tflops"),
            "in two": rate(in_two, work, "tflops"),
        }


def products(tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield TFLOP/s of the forward product, and of those for the gradients of inputs and of weights."""
    for size, (tokens, hidden, inner) in PRODUCTS.items():
        shapes = {
            "qkv": (tokens, 3 * hidden, hidden), "projection": (tokens, hidden, hidden),
            "fc1": (tokens, 2 * inner, hidden), "fc2": (tokens, hidden, inner), "head": (4096, 49536, hidden),
        }  # fmt: skip
        found = {}
        for name, sizes in shapes.items():
            m, n, k = (max(16, each // 256) if tiny else each for each in sizes)
            x, w, g = (torch.randn(shape, device=a_device()).bfloat16() for shape in ((m, k), (n, k), (m, n)))
            work = 2 * m * n * k / 1e12
            each = [
                rate(lambda x=x, w=w: x @ w.t(), work, "tflops"),
                rate(lambda g=g, w=w: g @ w, work, "tflops"),
                rate(lambda g=g, x=x: g.t() @ x, work, "tflops"),
            ]
            found[name] = [one.get("tflops", one.get("failed")) for one in each]
        yield {"products": size, **found}


if __name__ == "__main__":
    main()
