"""The chunked cross-entropy is torch's: on one process, on ranks that share the vocabulary (threads here), fused."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import rounding
import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn.functional import cross_entropy as plain_cross_entropy
from torch.utils._python_dispatch import _disable_current_modes
from unit.model.dispatched import Dispatched

from zerokara.model import loss, shapes, weight_gradients
from zerokara.model.layers import Kernels
from zerokara.model.loss import Projection, cross_entropy
from zerokara.model.shapes import loss_bytes

ROWS, VOCAB_SIZE, HIDDEN_SIZE, TOKENS, RANKS = 384, 130, 8, 20, 4
"""Of four ranks the second holds 34 real rows, the third and fourth only padding."""


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Process groups as each of `RANKS` threads sees them, and a collective among these."""
    barrier, values = threading.Barrier(RANKS), [torch.empty(0)] * RANKS

    def all_reduce(tensor: Tensor, op: object = ReduceOp.SUM, group: Any = None) -> None:
        values[group.rank()] = tensor.clone()
        barrier.wait(timeout=10)
        stacked = torch.stack(values)
        barrier.wait(timeout=10)
        tensor.copy_(stacked.amax(dim=0) if op == ReduceOp.MAX else stacked.sum(dim=0))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return [SimpleNamespace(rank=lambda rank=rank: rank) for rank in range(RANKS)]


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, labels and mask."""
    chance = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(TOKENS, HIDDEN_SIZE, generator=chance),
        torch.randn(ROWS, HIDDEN_SIZE, generator=chance),
    )
    labels = torch.randint(0, VOCAB_SIZE, (TOKENS,), generator=chance)
    return hidden, weight, labels, (torch.rand(TOKENS, generator=chance) < 0.7).float()


def computed(weight: Tensor, group: Any = None, softmax: Any = None) -> tuple[float, Tensor, Tensor, Tensor]:
    """The summed nats, their gradients, and the nats of each token."""
    hidden, _, labels, mask = inputs()
    hidden.requires_grad_()
    weight = weight.clone().requires_grad_()
    projection, kernels = Projection(weight, VOCAB_SIZE, group), Kernels(softmax)
    nats = cross_entropy(hidden[:, None], labels[None], mask[None], False, projection, kernels)
    (nats * 0.5).backward()
    (each,) = cross_entropy(hidden[:, None], labels[None], None, True, projection, kernels)
    assert hidden.grad is not None and weight.grad is not None and not each.requires_grad
    return nats.item(), hidden.grad, weight.grad, each


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, ROWS * 4 * 7, 2**30])
def test_loss_and_gradients_are_torchs(
    monkeypatch: pytest.MonkeyPatch, ranks: list[Any], chunk_bytes: int, is_shared: bool, is_fused: bool
) -> None:
    monkeypatch.setitem(shapes.CHUNK_BYTES, "cpu", chunk_bytes // (RANKS if is_shared else 1))
    hidden, weight, labels, mask = inputs()
    parts = hidden.requires_grad_(), weight.requires_grad_()
    each = plain_cross_entropy((hidden @ weight.t())[:, :VOCAB_SIZE], labels, reduction="none")
    of_hidden, of_weight = torch.autograd.grad((each * mask).sum() * 0.5, parts)
    shards = list(weight.detach().chunk(RANKS)) if is_shared else [weight.detach()]
    with ThreadPoolExecutor(RANKS) as pool:
        softmax = [loss.SOFTMAX if is_fused else None] * RANKS
        found = list(pool.map(computed, shards, ranks if is_shared else [None], softmax))
    for number, (nats, grad_hidden, _, each_found) in enumerate(found):
        rounding.assert_same_tensor(each_found, each.detach(), f"rank {number}")
        rounding.assert_same_loss(nats, (each * mask).sum().item())
        rounding.assert_same_tensor(grad_hidden, of_hidden, f"rank {number}")
    got = torch.cat([grad_weight for _, _, grad_weight, _ in found])
    rounding.assert_same_tensor(got, of_weight)
    assert got[:VOCAB_SIZE].abs().max() > 0.1 and not got[VOCAB_SIZE:].any()


def test_a_padding_row_that_takes_part_is_noticed() -> None:
    weight = inputs()[1]
    right, _, _, unmasked = computed(weight)
    log_sums = lambda logits, real: loss.log_sum_of_exponentials(logits, real + 1)  # noqa: E731
    at_once = lambda logits, labels, real: loss.nats_and_gradient(logits, labels, real + 1)  # noqa: E731
    nats, _, _, each = computed(weight, softmax=(log_sums, loss.softmax_of_real, at_once))
    for found, expected in ((nats, right), (each.sum().item(), unmasked.sum().item())):
        assert rounding.times_tolerance([found], [expected]) > rounding.BROKEN


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> tuple[Callable, Callable, Callable]:
    """Stand in, without temporaries, for kernels of a GPU: the compiled softmax, and a product added in fp32."""

    def kernel(result: Tensor, value: Callable[[], Tensor]) -> Tensor:
        with _disable_current_modes():
            return result.copy_(value())

    def add(total: Tensor, one: Tensor, other: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert out is total and total.dtype == out_dtype == torch.float32
        return kernel(total, lambda: total + one.float() @ other.float())

    log_sums: Callable = lambda x, real: kernel(torch.empty(len(x)), lambda: loss.SOFTMAX[0](x, real))  # noqa: E731
    softmax: Callable = lambda x, *rest: kernel(torch.empty_like(x), lambda: loss.SOFTMAX[1](x, *rest))  # noqa: E731

    def at_once(logits: Tensor, labels: Tensor, real: int) -> tuple[Tensor, Tensor]:
        results = torch.empty(len(logits)), torch.empty_like(logits)
        with _disable_current_modes():
            for result, value in zip(results, loss.SOFTMAX[2](logits, labels, real), strict=True):
                result.copy_(value)
        return results

    monkeypatch.setattr(weight_gradients, "adds_in_fp32", lambda *_: True)
    monkeypatch.setattr(torch, "addmm", add)
    return log_sums, softmax, at_once


@pytest.mark.parametrize(
    ("product", "expected"),
    [
        (lambda total, one, other: total + one.float() @ other.float(), True),
        (lambda total, one, other: (total + one.float() @ other.float()).bfloat16().float(), False),
        (lambda total, one, other: one.float() @ other.float(), False),
        (None, False),
    ],
    ids=["right", "rounded", "without the sum", "none"],
)
def test_a_product_is_added_in_fp32_only_where_the_sum_is_right(
    monkeypatch: pytest.MonkeyPatch, product: Callable | None, expected: bool
) -> None:
    def add(total: Tensor, one: Tensor, other: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        return out.copy_(product(total, one, other))

    if product:  # a CPU's refuses `out_dtype`
        monkeypatch.setattr(torch, "addmm", add)
    assert weight_gradients._adds_rightly(torch.device("cpu"), torch.bfloat16) == expected
    assert not weight_gradients.adds_in_fp32(torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda, compiled"])
@pytest.mark.parametrize("hidden_size", [16, 192])  # a chunk is larger than the weight, and smaller
def test_what_the_loss_takes_is_forecast_and_no_chunk_makes_a_gradient_of_the_weight(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, hidden_size: int
) -> None:
    """A matrix of that size for each chunk would be written, read and rounded."""
    monkeypatch.setattr(shapes, "CHUNK_BYTES", {"cpu": 0, "cuda": 0})
    monkeypatch.setattr(shapes, "LEAST_ROWS", {"cpu": 128, "cuda": 128})
    softmax = on_a_gpu(monkeypatch) if device != "cpu" else None
    kernels = Kernels(softmax if "compiled" in device else None)
    tokens, rows = 8 * 128, 1152
    monkeypatch.setattr(shapes, "BLOCK_BYTES", 4 * rows * (48 if device == "cpu" else 128))
    hidden, weight = (torch.randn(size, hidden_size, dtype=dtype).requires_grad_() for size in (tokens, rows))
    hidden_SBD = hidden.view(-1, 2, hidden_size) if device == "cpu" else hidden.view(2, -1, hidden_size).transpose(0, 1)
    labels = torch.randint(0, rows, (2, tokens // 2))
    with Dispatched() as seen:
        nats = cross_entropy(hidden_SBD, labels, None, False, Projection(weight, rows), kernels)
        torch.autograd.grad(nats, weight)
    expected = loss_bytes(device[:4].strip(","), tokens, rows, hidden_size, dtype.itemsize, "compiled" in device)
    assert seen.peak_bytes == pytest.approx(expected, rel=0.02)
    kept = 1 if dtype == torch.float32 else 2  # the sum over chunks, and in the dtype of the weight
    in_chunks = 8 if device == "cpu" and dtype == torch.bfloat16 else 0
    assert sum(size == weight.shape for _, size in seen.made) == kept + in_chunks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_that_stay_in_the_cache_change_no_bit(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(300, 16, generator=generator).to(dtype).requires_grad_()
    hidden = torch.randn(25, 4, 16, generator=generator).to(dtype).requires_grad_()
    labels, mask = (torch.randint(0, most, (4, 25), generator=generator) for most in (290, 2))
    found = []
    for block in (2**30, 4 * 300 * 7):
        monkeypatch.setattr(shapes, "BLOCK_BYTES", block)
        nats = cross_entropy(hidden, labels, mask.float(), False, Projection(weight, 290), Kernels())
        found.append([nats, *torch.autograd.grad(nats, (hidden, weight))])
    assert shapes.block_rows("cpu", 100, 300) == 7 and all(map(torch.equal, *found))


@pytest.mark.parametrize("is_fused", [False, True])
def test_without_a_gradient_none_is_computed(is_fused: bool) -> None:
    """A parameter requires a gradient during validation too; two thirds of the work would be for nothing."""
    hidden, weight, labels, _ = inputs()
    arguments = hidden[:, None], labels[None], None, False, Projection(weight.requires_grad_(), VOCAB_SIZE)
    expected = cross_entropy(*arguments, Kernels(loss.SOFTMAX if is_fused else None))
    failing = lambda *_: pytest.fail("a gradient of the logits was made")  # noqa: E731
    kernels = Kernels((loss.SOFTMAX[0], failing, failing) if is_fused else None)
    with torch.no_grad():
        assert torch.equal(cross_entropy(*arguments, kernels), expected)
        with Dispatched() as seen:
            cross_entropy(*arguments, kernels)
    assert not [size for _, size in seen.made if size in (weight.shape, hidden.shape)]
    assert sum(size == (TOKENS, ROWS) for _, size in seen.made) == 1 or is_fused, "the logits alone"
