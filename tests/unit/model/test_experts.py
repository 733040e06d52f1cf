"""The losses of experts written out, and what they and the experts may not depend on.

On rows of packed examples padding counts nowhere, and an example drops what it drops alone.
"""

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import rounding
import torch
from drawn_models import build
from engines import random_batch
from grouped import plain_grouped_mm
from made_examples import conversation, pair, write_examples
from shapes import shape_of
from torch import Tensor
from torch.nn.functional import linear

from zerokara.config.data import packed
from zerokara.config.engine import OptimSettings
from zerokara.model import experts
from zerokara.model.experts import PADDING, MixtureOfExperts, experts_of, statistics
from zerokara.samples.packed_examples import PackedExamples
from zerokara.training.run import as_tensors

SMALL = {"num_layers": 2, "seq_len": 24, "num_experts": 4}
MIXTRAL = {**SMALL, "architecture": "mixtral", "num_kv_heads": 2}
QWEN3_MOE = {**SMALL, "architecture": "qwen3_moe"}
FAMILIES = {
    "mixtral": MIXTRAL,
    "qwen3_moe": {**QWEN3_MOE, "moe_layers": [1], "moe_ffn_hidden_size": 40},
    "switch": {**SMALL, "architecture": "switch"},
    "t5_moe": {
        **SMALL, "architecture": "t5_moe", "moe_layers": [1], "experts_per_token": 3, "tie_word_embeddings": True
    },
}  # fmt: skip
PACKED = ("mixtral", "switch", "t5_moe")
ROUTING = OptimSettings(dropout=0.0, router_aux_loss_coef=0.3, router_z_loss_coef=0.2)
LENGTHS = {0: [5, 2, 9], 1: [11, 1], 2: [24], 3: []}
LENGTH = 24


def routed_with(capacity_factor: float) -> OptimSettings:
    """Experts of this capacity, without auxiliary losses."""
    return OptimSettings(
        dropout=0.0, router_aux_loss_coef=0.0, router_z_loss_coef=0.0, expert_capacity_factor=capacity_factor
    )


def layer_of(routing: OptimSettings = ROUTING, **overrides: Any) -> MixtureOfExperts:
    """The first MoE layer of a small Mixtral, its weights wide."""
    model = build(shape_of(**{**MIXTRAL, **overrides}), seed=1, settings=routing)
    layer = experts_of(model.all_layers())[0]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(10)
    return layer


def hidden(length: int = 24, batch: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(length, batch, 48, generator=torch.Generator().manual_seed(seed))


def test_grouped_experts_equal_one_by_one() -> None:
    """The kernel of a GPU in bf16, here on the CPU in bf16: equal to one by one within bf16's rounding."""
    layer = layer_of().to(torch.bfloat16)
    chosen_M = torch.tensor([0, 3, 3, 1, 0, 3, 1, 1])  # no token for expert 2
    sorted_MD = torch.randn(8, 48, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    ends_X = torch.bincount(chosen_M, minlength=4).cumsum(0).to(torch.int32)
    rounding.assert_same_tensor(layer._grouped(sorted_MD, ends_X), layer._one_by_one(sorted_MD, ends_X))


def test_an_expert_without_a_token_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, tokens = layer_of(), torch.randn(8, 48, generator=torch.Generator().manual_seed(1))
    ends_X = torch.tensor([2, 5, 5, 8], dtype=torch.int32)  # no token for expert 2

    def unwritten(mat: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
        """A kernel that does not write the gradient of a group without rows."""
        weights = weights.clone()
        weights.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([2]), math.nan))
        return plain_grouped_mm(mat, weights, offs)

    monkeypatch.setattr(experts, "grouped_mm", unwritten)
    layer._grouped(tokens, ends_X).square().sum().backward()
    found = [part.weight.grad.clone() for part in (layer.experts_fc1, layer.experts_fc2)]
    layer.zero_grad()
    layer._one_by_one(tokens, ends_X).square().sum().backward()
    for gradient, part in zip(found, (layer.experts_fc1, layer.experts_fc2), strict=True):
        assert not gradient[2].any()
        rounding.assert_same_tensor(gradient, part.weight.grad)


def test_a_full_expert_drops_the_later_choices_of_each_sequence() -> None:
    layer = layer_of(routed_with(0.5))
    capacity = math.ceil(0.5 * 2 * 24 / 4)
    tokens = hidden()
    _, chosen_SBk = linear(tokens, layer.router.weight).softmax(-1).topk(2)
    kept_SBk = layer._within_capacity(chosen_SBk)
    for b in range(3):
        seen = [0] * 4
        for s in range(24):
            for k in range(2):
                expert = int(chosen_SBk[s, b, k])
                seen[expert] += 1
                assert bool(kept_SBk[s, b, k]) is (seen[expert] <= capacity)
    limited = layer(tokens)[0]
    unlimited = layer.eval()(tokens)[0]
    dropped = (kept_SBk == 0).any(-1)
    assert dropped.any() and torch.equal(limited[~dropped], unlimited[~dropped])
    assert not torch.isclose(limited[dropped], unlimited[dropped]).all()
    # No token depends on a later one.
    layer.train()
    changed = tokens.clone()
    changed[12:] = hidden(seed=5)[12:]
    rounding.assert_same_tensor(layer(changed)[0][:12], limited[:12])  # other numbers of rows for the experts


def losses_by_hand(layer: MixtureOfExperts, tokens_SBD: Tensor) -> tuple[Tensor, Tensor]:
    """Load-balancing loss and z-loss of each sequence, step by step."""
    balances, squares = [], []
    for sequence in tokens_SBD.unbind(1):
        logits = linear(sequence, layer.router.weight)
        probabilities = logits.softmax(-1)
        chosen = probabilities.topk(layer.top_k).indices.flatten()
        shares = torch.stack([(chosen == expert).float().mean() for expert in range(4)])
        balances.append(4 * (shares * probabilities.mean(0)).sum())
        squares.append(logits.exp().sum(-1).log().square().mean())
    return torch.stack(balances), torch.stack(squares)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_loss_and_the_auxiliary_losses(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean nats over the tokens, plus the weighted means over the sequences: computed here, and as training does."""
    shape = shape_of(**FAMILIES[family])
    arguments = random_batch(shape, 3, torch.Generator().manual_seed(4))

    def gradients(whole: bool) -> tuple[float, dict[str, Tensor]]:
        model = build(shape, seed=2, settings=ROUTING)
        collected: list[Tensor] = []
        if not whole:  # the auxiliary losses are collected, and summed here
            monkeypatch.setattr(experts._Attach, "apply", lambda given, loss, _: collected.append(loss) or given)
        model.auxiliary.set_weight(1 / 3 if whole else 0, torch.device("cpu"))
        nats = model(*arguments)
        total = nats / arguments[1].numel()
        (total if whole else total + sum(collected) / 3).backward()
        monkeypatch.undo()
        return nats.item(), {name: part.grad.clone() for name, part in model.named_parameters()}

    ours, expected = gradients(whole=True), gradients(whole=False)
    assert ours[0] == expected[0], "the value of the loss is training's own"
    for name, gradient in expected[1].items():
        rounding.assert_same_tensor(ours[1][name], gradient, name)
    routers = [gradient for name, gradient in ours[1].items() if "router" in name]
    assert routers and all(gradient.abs().max() > 1e-4 for gradient in routers)


def test_auxiliary_losses_by_hand() -> None:
    layer, tokens = layer_of(), hidden()
    logits = linear(tokens, layer.router.weight)
    probabilities = logits.softmax(-1)
    found = layer._auxiliary_loss(logits, probabilities, probabilities.topk(2).indices)
    balances, squares = losses_by_hand(layer, tokens)
    rounding.assert_same_loss(found.item(), (0.3 * balances.sum() + 0.2 * squares.sum()).item())
    assert (balances > 1 - 1e-5).all(), "1 is the minimum, where all are equally loaded"


def test_statistics_by_layer() -> None:
    model = build(shape_of(**QWEN3_MOE, moe_layers=[0, 1]), seed=1, settings=routed_with(0.5))
    layers = model.all_layers()
    assert statistics(layers) == {}
    ids = torch.randint(0, 300, (3, 24), generator=torch.Generator().manual_seed(4))
    for _ in range(2):
        model(ids, ids)
    with torch.no_grad():
        model.eval()(ids, ids)  # validation does not count
    found = statistics(layers)
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(found, 2)
    assert all(1 <= load <= 4 for load in found["expert_load"])
    assert all(0 < share < 0.6 for share in found["expert_dropped"])
    assert all(0 < entropy <= math.log(4) + 1e-6 for entropy in found["router_entropy"])
    assert statistics(layers) == {}, "reset"


def rows() -> tuple[Tensor, Tensor]:
    """Hidden states [S, B, D], those of padding large, and the example or `PADDING` at each position [B, S]."""
    hidden = torch.randn(LENGTH, len(LENGTHS), 48, generator=torch.Generator().manual_seed(0))
    numbers = [[number for number, length in enumerate(lengths) for _ in range(length)] for lengths in LENGTHS.values()]
    examples = torch.tensor([[*row, *[PADDING] * (LENGTH - len(row))] for row in numbers])
    return torch.where((examples == PADDING).T[..., None], 5 * hidden, hidden), examples


def loss_of(layer: MixtureOfExperts, hidden_SBD: Tensor, examples_BS: Tensor | None = None) -> Tensor:
    """The auxiliary losses that the layer attaches, summed over the rows."""
    with mock.patch.object(experts._Attach, "apply", side_effect=lambda weights, *_: weights) as attach:
        layer(hidden_SBD, examples_BS)
    return attach.call_args.args[1]


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_row_with_padding_has_the_losses_of_the_row_without(top_k: int) -> None:
    """And padding has no gradient: neither behind examples, nor in a row of its own."""
    layer, (hidden, examples) = layer_of(architecture="qwen3_moe", experts_per_token=top_k), rows()
    hidden.requires_grad_()
    alone = [loss_of(layer, hidden[: sum(lengths), [row]]) for row, lengths in LENGTHS.items() if lengths]
    found = loss_of(layer, hidden, examples)
    found.backward(retain_graph=True)
    padding = (examples == PADDING).T
    assert hidden.grad is not None and not hidden.grad[padding].any() and (hidden.grad[~padding] != 0).any(-1).all()
    rounding.assert_same_loss(found.item(), sum(alone).item())
    without_mask = loss_of(layer, hidden)  # the broken twin
    assert rounding.times_tolerance([without_mask.item()], [found.item()]) > rounding.BROKEN


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("factor", [0.5, 0.7])
def test_an_example_drops_what_it_drops_alone(factor: float, top_k: int) -> None:
    layer, (hidden, examples) = layer_of(routed_with(factor), architecture="qwen3_moe", experts_per_token=top_k), rows()
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


def test_statistics_are_those_of_the_examples() -> None:
    layer, (hidden, examples) = layer_of(routed_with(0.5)), rows()
    layer(hidden, examples)
    found = layer.counts.take()
    for row, lengths in LENGTHS.items():
        for number in range(len(lengths)):
            layer(hidden[examples[row] == number][:, [row]])
    alone = layer.counts.take()
    rounding.assert_same_tensor(found.float(), alone.float())
    assert found[-1] == sum(map(sum, LENGTHS.values())) and found[:4].sum() == 2 * found[-1] > found[4]
    layer(hidden)  # the broken twin
    assert layer.counts.take()[-1] == hidden.size(0) * hidden.size(1)


def batch_of(family: str, folder: Any) -> list[Tensor]:
    is_pair, chance = family != "mixtral", np.random.default_rng(3)
    examples = [(pair if is_pair else conversation)(chance, 300, 2) for _ in range(8)]
    lengths = packed(24, 16, True) if is_pair else packed(24, 24, False)
    packed_rows = PackedExamples(write_examples(folder / "examples", examples), lengths, is_pair, 0)
    batch = packed_rows.many([0, 1, 2])
    assert (batch.segments.max(axis=1) == batch.num_examples).any(), "no padding"
    return as_tensors(batch)


@pytest.mark.parametrize("family", PACKED)
def test_a_model_tells_its_layers_which_positions_are_padding(family: str, tmp_path: Any) -> None:
    """The encoder's and the decoder's: by the tokens that were counted."""
    batch = batch_of(family, tmp_path)
    model = build(shape_of(**FAMILIES[family]), seed=2, settings=ROUTING)
    model(*batch)
    counted = [int(layer.counts.take()[-1]) for layer in experts_of(model.all_layers())]
    is_real = [segments < batch[-1][:, None] for segments in ([batch[4]] if family == "mixtral" else batch[5:7])]
    assert counted == [int(one.sum()) for one in is_real for _ in range(len(counted) // len(is_real))]
    assert statistics(model.all_layers()) == {}


@pytest.mark.parametrize(("hidden", "inner", "has"), [(96, 64, True), (96, 100, False), (100, 64, False)])
def test_the_kernel_takes_rows_of_whole_blocks(hidden: int, inner: int, has: bool) -> None:
    on_gpu: Any = mock.Mock(is_cuda=True, dtype=torch.bfloat16, shape=(8, hidden))
    assert experts.has_kernel(on_gpu, inner) == has
