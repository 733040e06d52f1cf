"""The mixture of experts against a plain one, its losses written out, and what neither may depend on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import rounding
import torch
from configs import config_of
from grouped import plain_grouped_mm
from shapes import shape_of
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, silu

from zerokara.model import experts
from zerokara.model.builder import build
from zerokara.model.experts import AuxiliaryLoss, MixtureOfExperts, Routing, experts_of, statistics
from zerokara.model.shapes import ModelShape

SMALL = {"num_layers": 3, "seq_len": 24, "num_experts": 4}
MIXTRAL = {**SMALL, "architecture": "mixtral", "num_kv_heads": 2}
QWEN3_MOE = {**SMALL, "architecture": "qwen3_moe"}
FAMILIES = {
    "mixtral": MIXTRAL,
    "qwen3_moe": {**QWEN3_MOE, "moe_layers": [1], "moe_ffn_hidden_size": 40},
    "switch": {**SMALL, "architecture": "switch"},
    "t5_moe": {
        **SMALL, "architecture": "t5_moe", "moe_layers": [0, 2], "experts_per_token": 3, "tie_word_embeddings": True
    },
}  # fmt: skip
ROUTING = Routing(aux_loss_coef=0.3, z_loss_coef=0.2)


def layer_of(routing: Routing = ROUTING, **overrides: Any) -> MixtureOfExperts:
    """The first MoE layer of a small Mixtral, its weights wide."""
    model = build(shape_of(**MIXTRAL, **overrides), seed=1, routing=routing)
    layer = experts_of(model.all_layers())[0]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(10)
    return layer


def hidden(length: int = 24, batch: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(length, batch, 48, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_counted_parameters_are_those_built(family: str) -> None:
    shape = shape_of(**FAMILIES[family])
    built = {name: tuple(part.shape) for name, part in build(shape).named_parameters()}
    assert built == shape.parameter_shapes()
    assert sum(math.prod(size) for size in built.values()) == shape.num_parameters()
    padding = (shape.padded_vocab_size - shape.vocab_size) * 48 * (1 if shape.tie_word_embeddings else 2)
    in_experts = sum(math.prod(size) for name, size in built.items() if ".experts_" in name)
    idle = in_experts // shape.num_experts * (shape.num_experts - shape.experts_per_token)
    assert shape.num_active_parameters() == shape.num_parameters() - padding - idle


def test_the_korean_base_has_the_parameters_that_its_authors_state() -> None:
    """About 700.6M and 304.2M active: 12 + 12 layers of hidden size 768, 16 experts in layers 3, 7, 11, two a token."""
    settings = config_of(
        architecture="t5_moe", num_layers=12, hidden_size=768, num_attn_heads=12, ffn_hidden_size=2048,
        num_experts=16, seq_len=512,
    )  # fmt: skip
    assert settings.resolved_sizes()["moe_layers"] == (3, 7, 11) and settings.resolved_sizes()["experts_per_token"] == 2
    shape = ModelShape.from_config(settings, vocab_size=50_358)
    assert shape.num_parameters(padded=False) == pytest.approx(700.6e6, rel=1e-3)
    assert shape.num_active_parameters() == pytest.approx(304.2e6, rel=1e-3)


def token_by_token(layer: MixtureOfExperts, tokens_SBD: Tensor) -> Tensor:
    """Every token by itself."""
    made = torch.zeros_like(tokens_SBD)
    for s in range(tokens_SBD.size(0)):
        for b in range(tokens_SBD.size(1)):
            token = tokens_SBD[s, b]
            weights, chosen = linear(token, layer.router.weight).softmax(-1).topk(layer.top_k)
            weights = weights / weights.sum() if layer.top_k > 1 else weights
            for weight, expert in zip(weights, chosen.tolist(), strict=True):
                gate, up = linear(token, layer.experts_fc1.weight[expert]).chunk(2)
                made[s, b] += weight * linear(silu(gate) * up, layer.experts_fc2.weight[expert])
    return made


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_each_token_gets_the_weighted_sum_of_its_experts(top_k: int) -> None:
    layer = layer_of(Routing(), experts_per_token=top_k)
    tokens = hidden()
    found, bias = layer(tokens)
    assert bias is None
    rounding.assert_same_tensor(found, token_by_token(layer, tokens))


def test_grouped_experts_equal_one_by_one() -> None:
    """The kernel of a GPU in bf16, here on the CPU in bf16: equal to one by one within bf16's rounding."""
    layer = layer_of().to(torch.bfloat16)
    chosen_M = torch.tensor([0, 3, 3, 1, 0, 3, 1, 1])  # no token for expert 2
    sorted_MD = torch.randn(8, 48, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    ends_X = torch.bincount(chosen_M, minlength=4).cumsum(0).to(torch.int32)
    rounding.assert_same_tensor(layer._grouped(sorted_MD, ends_X), layer._one_by_one(sorted_MD, ends_X))


def test_an_expert_without_a_token_gets_no_gradient_whatever_the_kernel_leaves_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, tokens = layer_of(), torch.randn(8, 48, generator=torch.Generator().manual_seed(1))
    ends_X = torch.tensor([2, 5, 5, 8], dtype=torch.int32)  # no token for expert 2

    class Unwritten(torch.autograd.Function):
        """A kernel that does not write the gradient of a group without rows."""

        @staticmethod
        def forward(ctx: Any, mat: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
            ctx.save_for_backward(mat, weights, offs)
            return plain_grouped_mm(mat, weights, offs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
            mat, weights, offs = ctx.saved_tensors
            with torch.enable_grad():
                parts = mat.detach().requires_grad_(), weights.detach().requires_grad_()
                of_mat, of_weights = torch.autograd.grad(plain_grouped_mm(*parts, offs), parts, grad)
            of_weights[2] = math.nan
            return of_mat, of_weights, None

    monkeypatch.setattr(experts, "grouped_mm", lambda mat, weights, offs: Unwritten.apply(mat, weights, offs))
    layer._grouped(tokens, ends_X).square().sum().backward()
    found = [part.weight.grad.clone() for part in (layer.experts_fc1, layer.experts_fc2)]
    layer.zero_grad()
    layer._one_by_one(tokens, ends_X).square().sum().backward()
    for gradient, part in zip(found, (layer.experts_fc1, layer.experts_fc2), strict=True):
        assert not gradient[2].any()
        rounding.assert_same_tensor(gradient, part.weight.grad)


def test_a_full_expert_drops_the_later_choices_of_each_sequence() -> None:
    layer = layer_of(Routing(capacity_factor=0.5))
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
    assert torch.equal(layer(changed)[0][:12], limited[:12])


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
@pytest.mark.parametrize("checkpointing", ["off", "selective", "full"])
def test_gradients_are_those_of_the_loss_and_the_auxiliary_losses(
    family: str, checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mean nats over the tokens, plus the weighted means over the sequences: computed here, and as training does."""
    shape = shape_of(**FAMILIES[family])
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 300, (3, 24), generator=generator)
    labels = torch.randint(0, 300, (3, shape.target_len), generator=generator)
    arguments = [ids, labels, torch.ones(labels.shape)]
    if shape.traits.is_encoder_decoder:
        arguments.append(labels.roll(1, dims=1))

    def gradients(whole: bool) -> tuple[float, dict[str, Tensor]]:
        model = build(shape, seed=2, activation_checkpointing=checkpointing if whole else "off", routing=ROUTING)
        collected: list[Tensor] = []
        if not whole:  # the auxiliary losses are collected, and summed here
            monkeypatch.setattr(AuxiliaryLoss, "attach", lambda _, weights, loss: collected.append(loss) or weights)
        model.auxiliary.set_weight(1 / 3 if whole else 0, torch.device("cpu"))
        nats = model(*arguments)
        total = nats / labels.numel()
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


def test_sequences_do_not_depend_on_each_other() -> None:
    """So that neither the micro batch nor the number of processes changes what is learned."""
    layer = layer_of(Routing(0.3, 0.2, capacity_factor=0.7))
    together = layer(hidden())[0]
    apart = torch.cat([layer(one)[0] for one in hidden().split(1, dim=1)], dim=1)
    rounding.assert_same_tensor(together, apart)


def test_statistics_by_layer() -> None:
    model = build(shape_of(**QWEN3_MOE, moe_layers=[0, 2]), seed=1, routing=Routing(capacity_factor=0.5))
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


def test_the_loss_of_a_model_with_experts_is_cross_entropy() -> None:
    model = build(shape_of(**MIXTRAL), seed=1, routing=ROUTING)
    ids = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(4))
    plain = cross_entropy(model(ids[:, :-1])[..., :300].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    rounding.assert_same_loss(model(ids[:, :-1], ids[:, 1:]).item(), plain.item())
