"""The chunked cross-entropy is torch's: on one process, on ranks that share the vocabulary (threads here), fused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import rounding
import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn.functional import cross_entropy as plain_cross_entropy

from zerokara.model import loss
from zerokara.model.loss import cross_entropy

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


def computed(weight: Tensor, group: Any = None) -> tuple[float, Tensor, Tensor, Tensor]:
    """The summed nats, their gradients, and the nats of each token."""
    hidden, _, labels, mask = inputs()
    hidden.requires_grad_()
    weight = weight.clone().requires_grad_()
    nats = cross_entropy(hidden[:, None], labels[None], mask[None], False, weight, VOCAB_SIZE, group)
    (nats * 0.5).backward()
    (each,) = cross_entropy(hidden[:, None], labels[None], None, True, weight, VOCAB_SIZE, group)
    assert hidden.grad is not None and weight.grad is not None and not each.requires_grad
    return nats.item(), hidden.grad, weight.grad, each


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, ROWS * 4 * 7, 2**30])
def test_loss_and_gradients_are_torchs(
    monkeypatch: pytest.MonkeyPatch, ranks: list[Any], chunk_bytes: int, is_shared: bool, is_fused: bool
) -> None:
    monkeypatch.setitem(loss.CHUNK_BYTES, "cpu", chunk_bytes // (RANKS if is_shared else 1))
    monkeypatch.setattr(loss, "fused_softmax", loss.softmax_times_mask if is_fused else None)
    monkeypatch.setattr(loss, "fused_parallel_softmax", loss.PARALLEL_SOFTMAX if is_fused else None)
    hidden, weight, labels, mask = inputs()
    parts = hidden.requires_grad_(), weight.requires_grad_()
    each = plain_cross_entropy((hidden @ weight.t())[:, :VOCAB_SIZE], labels, reduction="none")
    of_hidden, of_weight = torch.autograd.grad((each * mask).sum() * 0.5, parts)
    shards = list(weight.detach().chunk(RANKS)) if is_shared else [weight.detach()]
    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(computed, shards, ranks if is_shared else [None]))
    for number, (nats, grad_hidden, _, each_found) in enumerate(found):
        rounding.assert_same_tensor(each_found, each.detach(), f"rank {number}")
        rounding.assert_same_loss(nats, (each * mask).sum().item())
        rounding.assert_same_tensor(grad_hidden, of_hidden, f"rank {number}")
    got = torch.cat([grad_weight for _, _, grad_weight, _ in found])
    rounding.assert_same_tensor(got, of_weight)
    assert got[:VOCAB_SIZE].abs().max() > 0.1 and not got[VOCAB_SIZE:].any()


def test_a_padding_row_that_takes_part_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, right = inputs()[1], computed(inputs()[1])[0]
    broken = lambda logits, mask, real: loss.softmax_times_mask(logits, mask, real + 1)  # noqa: E731
    monkeypatch.setattr(loss, "fused_softmax", broken)
    assert rounding.times_tolerance([computed(weight)[0]], [right]) > rounding.BROKEN


def test_without_a_gradient_none_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter requires a gradient during validation too; two thirds of the work would be for nothing."""
    hidden, weight, labels, _ = inputs()
    arguments = hidden[:, None], labels[None], None, False, weight.requires_grad_(), VOCAB_SIZE
    expected = cross_entropy(*arguments)
    monkeypatch.setattr(Tensor, "addmm_", lambda *_, **__: pytest.fail("the weight's gradient was made"))
    with torch.no_grad():
        assert torch.equal(cross_entropy(*arguments), expected)


def test_a_second_backward_pass_is_refused() -> None:
    hidden, weight, labels, _ = inputs()
    nats = cross_entropy(hidden.requires_grad_()[:, None], labels[None], None, False, weight, VOCAB_SIZE)
    nats.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        nats.backward()
