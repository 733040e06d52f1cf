"""The vocabulary-parallel cross-entropy equals that of one process; here the ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import rounding
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from zerokara.model import loss as loss_module
from zerokara.model.loss import cross_entropy

ROWS, VOCAB_SIZE, HIDDEN_SIZE = 384, 130, 8
"""Of four ranks the second holds 34 real rows, the third and fourth only padding."""


@dataclass(frozen=True)
class Group:
    """A process group as one of its ranks sees it."""

    number: int

    def rank(self) -> int:
        """This rank."""
        return self.number


def all_reduce_among(size: int) -> Callable[..., None]:
    """The collective, over threads."""
    barrier, values = threading.Barrier(size), [torch.empty(0)] * size

    def all_reduce(tensor: Tensor, op: object = ReduceOp.SUM, group: Group | None = None) -> None:
        assert group is not None
        values[group.rank()] = tensor.clone()
        barrier.wait(timeout=10)
        stacked = torch.stack(values)
        barrier.wait(timeout=10)
        tensor.copy_(stacked.amax(dim=0) if op == ReduceOp.MAX else stacked.sum(dim=0))

    return all_reduce


@pytest.mark.parametrize("chunk_bytes", [1, 96 * 4 * 7, 2**30])
def test_loss_and_gradients_are_those_of_one_process(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    monkeypatch.setitem(loss_module.CHUNK_BYTES, "cpu", chunk_bytes)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce_among(4))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 1, HIDDEN_SIZE, generator=generator)
    weight = torch.randn(ROWS, HIDDEN_SIZE, generator=generator)
    labels = torch.randint(0, VOCAB_SIZE, (1, 20), generator=generator)
    mask = (torch.rand(1, 20, generator=generator) < 0.7).float()

    def run(rows: Tensor, group: Group | None) -> tuple[float, Tensor, Tensor, Tensor]:
        mine, weight = hidden.clone().requires_grad_(), rows.clone().requires_grad_()
        nats = cross_entropy(mine, labels, mask, False, weight, VOCAB_SIZE, group)  # type: ignore[arg-type]
        (nats * 0.5).backward()
        assert mine.grad is not None and weight.grad is not None
        each = cross_entropy(hidden, labels, None, True, rows, VOCAB_SIZE, group)  # type: ignore[arg-type]
        return nats.item(), mine.grad, weight.grad, each

    nats, of_hidden, of_weight, nats_N = run(weight, None)
    with ThreadPoolExecutor(4) as pool:
        shared = list(pool.map(run, weight.chunk(4), map(Group, range(4))))
    for number, (each, of_each, _, each_N) in enumerate(shared):
        rounding.assert_same_tensor(each_N, nats_N, f"rank {number}")
        rounding.assert_same_loss(each, nats)
        rounding.assert_same_tensor(of_each, of_hidden, f"rank {number}")
    got = torch.cat([each[2] for each in shared])
    rounding.assert_same_tensor(got, of_weight)
    assert got[:VOCAB_SIZE].abs().max() > 0.1 and not got[VOCAB_SIZE:].any()


def test_without_a_gradient_none_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter requires a gradient during validation too; two thirds of the work would be for nothing."""
    weight = torch.randn(ROWS, HIDDEN_SIZE, requires_grad=True)
    arguments = torch.randn(5, 1, HIDDEN_SIZE), torch.arange(5)[None], None, False, weight, VOCAB_SIZE
    expected = cross_entropy(*arguments)
    monkeypatch.setattr(Tensor, "addmm_", lambda *_, **__: pytest.fail("the weight's gradient was made"))
    with torch.no_grad():
        assert torch.equal(cross_entropy(*arguments), expected)
