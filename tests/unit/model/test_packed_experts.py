"""A mixture of experts on rows of packed examples: padding counts nowhere, and an example drops what it drops alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import rounding
import torch
from made_examples import conversation, pair, write_examples
from shapes import shape_of
from torch import Tensor

from zerokara.config.data import packed
from zerokara.model.builder import Model, build
from zerokara.model.experts import PADDING, MixtureOfExperts, Routing, experts_of, statistics
from zerokara.samples.packed_examples import PackedExamples, Pairs
from zerokara.training.run import as_tensors

ROUTING = Routing(aux_loss_coef=0.3, z_loss_coef=0.2)
SMALL = {"num_layers": 2, "seq_len": 24, "num_experts": 4}
FAMILIES = {
    "mixtral": {**SMALL, "architecture": "mixtral", "num_kv_heads": 2},
    "switch": {**SMALL, "architecture": "switch", "moe_layers": (1,)},
    "t5_moe": {**SMALL, "architecture": "t5_moe", "moe_layers": (1,)},
}
LENGTHS = {0: [5, 2, 9], 1: [11, 1], 2: [24], 3: []}
"""Of the examples in each row of 24."""
LENGTH = 24


def layer_of(routing: Routing = ROUTING, top_k: int = 2) -> MixtureOfExperts:
    """An MoE layer with wide weights, so that its experts are loaded unevenly."""
    model = build(shape_of(**FAMILIES["mixtral"], experts_per_token=top_k), seed=1, routing=routing)
    layer = experts_of(model.all_layers())[0]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(10)
    return layer


def rows() -> tuple[Tensor, Tensor]:
    """Hidden states [S, B, D], those of padding large, and the example or `PADDING` at each position [B, S]."""
    hidden = torch.randn(LENGTH, len(LENGTHS), 48, generator=torch.Generator().manual_seed(0))
    numbers = [[number for number, length in enumerate(lengths) for _ in range(length)] for lengths in LENGTHS.values()]
    examples = torch.tensor([[*row, *[PADDING] * (LENGTH - len(row))] for row in numbers])
    return torch.where((examples == PADDING).T[..., None], 5 * hidden, hidden), examples


def loss_of(layer: MixtureOfExperts, hidden_SBD: Tensor, examples_BS: Tensor | None = None) -> Tensor:
    """The auxiliary losses that the layer attaches, summed over the rows."""
    collected: list[Tensor] = []
    layer.auxiliary.attach = lambda weights, loss: collected.append(loss) or weights  # type: ignore[method-assign]
    layer(hidden_SBD, examples_BS)
    return collected[0]


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_row_with_padding_has_the_losses_of_the_row_without(top_k: int) -> None:
    layer, (hidden, examples) = layer_of(top_k=top_k), rows()
    alone = [loss_of(layer, hidden[: sum(lengths), [row]]) for row, lengths in LENGTHS.items() if lengths]
    found = loss_of(layer, hidden, examples)
    rounding.assert_same_loss(found.item(), sum(alone).item())
    without_mask = loss_of(layer, hidden)  # the broken twin
    assert rounding.times_tolerance([without_mask.item()], [found.item()]) > rounding.BROKEN


def test_the_gradient_of_padding_is_zero_and_a_row_of_padding_adds_nothing() -> None:
    layer, (hidden, examples) = layer_of(), rows()
    hidden.requires_grad_()
    loss_of(layer, hidden, examples).backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()
    padding = (examples == PADDING).T
    assert not hidden.grad[padding].any() and (hidden.grad[~padding] != 0).any(-1).all()
    assert loss_of(layer, hidden[:, [3]], examples[[3]]) == 0


@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_rows_without_padding_are_computed_as_without_a_mask(factor: float) -> None:
    layer, (hidden, _) = layer_of(Routing(0.3, 0.2, factor)), rows()
    one_example = torch.zeros(len(LENGTHS), LENGTH, dtype=torch.int64)
    assert torch.equal(layer(hidden, one_example)[0], layer(hidden)[0])
    assert torch.equal(loss_of(layer, hidden, one_example), loss_of(layer, hidden))
    layer.counts.take()
    layer(hidden, one_example)
    counted = layer.counts.take()
    layer(hidden)
    assert torch.equal(counted, layer.counts.take())


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("factor", [0.5, 0.7, 1.25])
def test_an_example_drops_what_it_drops_alone(factor: float, top_k: int) -> None:
    layer, (hidden, examples) = layer_of(Routing(capacity_factor=factor), top_k), rows()
    together = layer(hidden, examples)[0]
    by_row, dropped_alone = layer(hidden)[0], 0
    differs = []
    for row, lengths in LENGTHS.items():
        for number in range(len(lengths)):
            own = examples[row] == number
            alone = hidden[own][:, [row]]
            rounding.assert_same_tensor(together[own, row], layer(alone)[0][:, 0])
            layer.eval()
            dropped_alone += int((layer(alone)[0][:, 0] - together[own, row]).abs().amax(-1).gt(1e-3).sum())
            layer.train()
            differs.append((by_row[own, row] - together[own, row]).abs().max())
    assert dropped_alone > 0, "nothing was dropped: equality would mean nothing"
    assert max(differs) > 0.1  # the broken twin: the capacity of a row


def test_no_choice_of_an_example_depends_on_the_others_of_its_row() -> None:
    layer, (hidden, examples) = layer_of(Routing(capacity_factor=0.5)), rows()
    expected = layer(hidden, examples)[0]
    others = examples != 1
    changed = torch.where(others.T[..., None], hidden.flip(0), hidden)
    found = layer(changed, examples)[0]
    assert torch.equal(found[~others.T], expected[~others.T]) and not torch.equal(found, expected)


def test_statistics_are_those_of_the_examples() -> None:
    layer, (hidden, examples) = layer_of(Routing(capacity_factor=0.5)), rows()
    layer(hidden, examples)
    found = layer.counts.take()
    for row, lengths in LENGTHS.items():
        for number in range(len(lengths)):
            layer(hidden[examples[row] == number][:, [row]])
    alone = layer.counts.take()
    assert found is not None and alone is not None
    rounding.assert_same_tensor(found.float(), alone.float())
    assert found[-1] == sum(map(sum, LENGTHS.values())) and found[:4].sum() == 2 * found[-1] > found[4]
    layer(hidden)  # the broken twin
    assert layer.counts.take()[-1] == hidden.size(0) * hidden.size(1)


def batch_of(family: str, folder: Any) -> list[Tensor]:
    is_pair, chance = family != "mixtral", np.random.default_rng(3)
    examples = [(pair if is_pair else conversation)(chance, 300, 2) for _ in range(8)]
    lengths = packed(24, 16, True) if is_pair else packed(24, 24, False)
    made = PackedExamples(write_examples(folder / "examples", examples), lengths, is_pair, 0)
    batch = Pairs(lengths, 0 if is_pair else None)(made.many([0, 1, 2]), np.zeros(3, np.int64))
    assert batch.segments is not None and batch.num_examples is not None
    assert (batch.segments.max(axis=1) == batch.num_examples).any(), "no padding"
    return as_tensors(batch)


def gradients(model: Model, batch: list[Tensor]) -> dict[str, Tensor]:
    model.auxiliary.set_weight(1 / 3, torch.device("cpu"))
    (model(*batch) / batch[2].sum()).backward()
    return {name: part.grad.clone() for name, part in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_layers_are_told_of_padding(family: str, tmp_path: Any) -> None:
    batch, shape = batch_of(family, tmp_path), shape_of(**FAMILIES[family])
    routing = Routing(0.3, 0.2, capacity_factor=0.7)
    found = {
        mode: gradients(build(shape, seed=2, activation_checkpointing=mode, routing=routing), batch)
        for mode in ("off", "selective", "full")
    }
    told_nothing = gradients(build(shape, seed=2, routing=routing), batch[:-1])  # the broken twin
    for name, gradient in found["off"].items():
        assert torch.equal(found["selective"][name], gradient) and torch.equal(found["full"][name], gradient), name
        if "router" in name:
            assert rounding.tensor_times_tolerance(told_nothing[name], gradient) > rounding.BROKEN


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_tells_its_layers_which_positions_are_padding(family: str, tmp_path: Any) -> None:
    """The encoder's and the decoder's: by the tokens that were counted."""
    batch = batch_of(family, tmp_path)
    model = build(shape_of(**FAMILIES[family]), seed=2, routing=ROUTING)
    model(*batch)
    counted = [int(layer.counts.take()[-1]) for layer in experts_of(model.all_layers())]
    is_real = [segments < batch[-1][:, None] for segments in ([batch[3]] if family == "mixtral" else batch[4:6])]
    assert counted == [int(one.sum()) for one in is_real for _ in range(len(counted) // len(is_real))]
    assert statistics(model.all_layers()) == {}
