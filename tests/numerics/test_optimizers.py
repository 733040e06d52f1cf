"""Each optimizer against its paper, implemented plainly here; and the gradient norm and clipping against torch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import rounding
import torch
from configs import config_of
from engines import chains, engine_of, join_alone
from shapes import named
from torch import Tensor
from transformers import LlamaForCausalLM

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.huggingface import families, weight_rules
from zerokara.model.builder import build
from zerokara.model.shapes import ModelShape
from zerokara.training.compute.engine import Engine, master_weights, optimizer_state

NUM_STEPS, BATCH, LENGTH, VOCAB = 20, 4, 24, 300
SETTINGS: dict[str, Any] = {
    "hidden_size": 32, "num_kv_heads": 2, "ffn_hidden_size": 64, "seq_len": LENGTH, "global_batch_size": BATCH,
    "micro_batch_size": 2, "tie_word_embeddings": False, "init_std": 0.05, "muon_momentum": 0.9,
    "gradient_clipping": 0.5, "zero_stage": 1,
}  # fmt: skip
LEARNING_RATES = [0.01 * min(1, step / 4) for step in range(1, NUM_STEPS + 1)]
OF_ADAFACTOR = [5 * rate for rate in LEARNING_RATES]
"""A share of the weights, which are small."""
COUNT = float(BATCH * LENGTH)


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    return chains(NUM_STEPS, BATCH, LENGTH, VOCAB)


@pytest.fixture(autouse=True)
def _alone() -> None:
    join_alone()


def settings_and_shape(**overrides: Any) -> tuple[PretrainConfig, ModelShape]:
    settings = config_of(**{**SETTINGS, **overrides})
    return settings, ModelShape.from_config(settings, VOCAB)


def accumulate(engine: Engine, ids: Tensor) -> float:
    nats = 0.0
    for part in ids.split(2):
        nats += engine.accumulate([part[:, :-1], part[:, 1:], torch.ones(part[:, 1:].shape)], COUNT, BATCH).item()
    return nats / COUNT


def losses_of_ours(batches: list[Tensor], rates: list[float] = LEARNING_RATES, **overrides: Any) -> list[float]:
    settings, shape = settings_and_shape(**overrides)
    engine = engine_of(build(shape, seed=1), settings)
    losses = []
    for ids, learning_rate in zip(batches, rates, strict=True):
        losses.append(accumulate(engine, ids))
        engine.update(learning_rate)
    return losses


def losses_of_plain(
    model: torch.nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    update: Callable[[str, Tensor, int, float], None],
    batches: list[Tensor],
    rates: list[float] = LEARNING_RATES,
) -> list[float]:
    """Train with `update(name, parameter, step, learning rate)` after torch's own clipping."""
    losses = []
    for step, (ids, learning_rate) in enumerate(zip(batches, rates, strict=True), start=1):
        model.zero_grad()
        loss = loss_of(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                update(name, parameter, step, learning_rate)
        losses.append(loss.item())
    return losses


def plain_muon(momentum: float, decay: float, scale: float = 0.2) -> Callable[[str, Tensor, int, float], None]:
    """Liu et al., 2025, algorithm 1 with Nesterov momentum; AdamW for all but the matrices of the layers."""
    buffers: dict[str, list[Tensor]] = {}

    def update(name: str, weight: Tensor, step: int, learning_rate: float) -> None:
        gradient = weight.grad
        assert gradient is not None
        first, second = buffers.setdefault(name, [torch.zeros_like(weight), torch.zeros_like(weight)])
        if weight.dim() == 2 and ".layers." in name:
            first.copy_(momentum * first + gradient)
            x = gradient + momentum * first
            x = x / x.norm()
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
            weight.copy_(weight - learning_rate * (scale * math.sqrt(max(weight.shape)) * x + decay * weight))
            return
        first.copy_(0.9 * first + 0.1 * gradient)
        second.copy_(0.95 * second + 0.05 * gradient**2)
        direction = (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        weight.copy_(weight - learning_rate * (direction + (decay if weight.dim() > 1 else 0) * weight))

    return update


def plain_adafactor(decay: float, exponent: float = 0.8) -> Callable[[str, Tensor, int, float], None]:
    """Shazeer and Stern, 2018, algorithms 4 and 5, with a given learning rate in the place of the relative step."""
    memory: dict[str, list[Tensor]] = {}

    def update(name: str, weight: Tensor, step: int, learning_rate: float) -> None:
        gradient = weight.grad
        assert gradient is not None
        beta = 1 - step**-exponent
        squares = gradient**2 + 1e-30
        if weight.dim() == 2:
            rows, columns = memory.setdefault(name, [torch.zeros(weight.size(0)), torch.zeros(weight.size(1))])
            rows.copy_(beta * rows + (1 - beta) * squares.sum(dim=1))
            columns.copy_(beta * columns + (1 - beta) * squares.sum(dim=0))
            second = torch.outer(rows, columns) / rows.sum()
        else:
            (second,) = memory.setdefault(name, [torch.zeros_like(weight)])
            second.copy_(beta * second + (1 - beta) * squares)
        direction = gradient / second.sqrt()
        direction = direction / max(1.0, direction.square().mean().sqrt().item())
        scaled = learning_rate * max(1e-3, weight.square().mean().sqrt().item())
        weight.copy_(weight - scaled * (direction + (decay if weight.dim() > 1 else 0) * weight))

    return update


def losses_of_hugging_face(batches: list[Tensor], scale: float = 0.2) -> list[float]:
    """Muon on a model whose queries, keys, values, gates and ups are matrices of their own."""
    settings, shape = settings_and_shape(optimizer="muon")
    ours = {name: parameter.detach() for name, parameter in build(shape, seed=1).named_parameters()}
    model = LlamaForCausalLM(families.hf_config(shape, families.SpecialIds(bos=1, eos=2, pad=3), "fp32"))
    model.load_state_dict(dict(weight_rules.to_hf(families.rules_for(shape), ours, shape)), strict=True)

    def loss_of(ids: Tensor) -> Tensor:
        loss = model(input_ids=ids[:, :-1], labels=ids[:, 1:], shift_labels=ids[:, 1:].contiguous()).loss
        assert isinstance(loss, Tensor)
        return loss

    update = plain_muon(settings.muon_momentum, settings.weight_decay, scale)
    return losses_of_plain(model, loss_of, update, batches)


def losses_of_plain_adafactor(batches: list[Tensor], exponent: float = 0.8) -> list[float]:
    settings, shape = settings_and_shape(optimizer="adafactor")
    model = build(shape, seed=1)
    update = plain_adafactor(settings.weight_decay, exponent)
    return losses_of_plain(model, lambda ids: model(ids[:, :-1], ids[:, 1:]) / COUNT, update, batches, OF_ADAFACTOR)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_muon_is_that_of_its_paper(zero_stage: int, batches: list[Tensor]) -> None:
    ours, expected = losses_of_ours(batches, optimizer="muon", zero_stage=zero_stage), losses_of_hugging_face(batches)
    assert ours[0] - ours[-1] > 0.1
    rounding.assert_same_curve(ours, expected)
    wrong = losses_of_hugging_face(batches, scale=0.25)  # the broken twin
    assert rounding.times_tolerance(wrong, expected) > rounding.BROKEN


def test_adafactor_is_that_of_its_paper(batches: list[Tensor]) -> None:
    ours = losses_of_ours(batches, OF_ADAFACTOR, optimizer="adafactor", zero_stage=0)
    expected = losses_of_plain_adafactor(batches)
    assert ours[0] - ours[-1] > 0.5
    rounding.assert_same_curve(ours, expected)
    wrong = losses_of_plain_adafactor(batches, exponent=0.7)  # the broken twin
    assert rounding.times_tolerance(wrong, expected) > rounding.BROKEN


@pytest.mark.parametrize(
    "overrides",
    [
        *[{"zero_stage": stage} for stage in range(4)],
        {"zero_stage": 2, "offload": "optimizer"},
        {"zero_stage": 3, "offload": "all"},
        {"optimizer": "adafactor", "zero_stage": 0},
        {"optimizer": "muon", "zero_stage": 1},
    ],
    ids=named,
)
def test_the_norm_is_torchs_and_clipped_gradients_enter_the_state(
    overrides: dict[str, Any], batches: list[Tensor]
) -> None:
    """The gradient norm; and a state after clipping that is the one of gradients scaled beforehand."""
    ids = batches[0]
    _, shape = settings_and_shape()
    plain = build(shape, seed=1)
    (plain(ids[:, :-1], ids[:, 1:]) / COUNT).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item()
    assert norm > 0.6, "nothing would be clipped"
    settings, _ = settings_and_shape(**overrides)
    engine = engine_of(build(shape, seed=1), settings, chosen_for=2)
    accumulate(engine, ids)
    rounding.assert_same_loss(engine.update(0.01), norm)  # of one step, so as near as its loss
    clipped = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for key, moment in optimizer_state(engine):
        name, _, kind = key.rpartition(".")
        gradient = clipped[name]
        assert gradient is not None
        expected = {
            "exp_avg": lambda g: 0.1 * g,
            "exp_avg_sq": lambda g: (0.05 if settings.optimizer != "adafactor" else 1) * g**2,
            "momentum_buffer": lambda g: g,
            "exp_avg_sq_row": lambda g: (g**2).mean(dim=1),
            "exp_avg_sq_col": lambda g: (g**2).mean(dim=0),
        }[kind](gradient)
        rounding.assert_same_tensor(moment, expected, key)


@pytest.mark.parametrize("how", ["not finite", "discarded"])
@pytest.mark.parametrize(
    "overrides",
    [
        {"optimizer": "muon", "zero_stage": 0, "precision": "bf16"},
        {"zero_stage": 1, "precision": "bf16"},
        {"zero_stage": 1, "precision": "fp32", "offload": "optimizer"},
        {"zero_stage": 3, "precision": "bf16", "offload": "all"},
    ],
    ids=named,
)
def test_a_skipped_step_changes_nothing(overrides: dict[str, Any], how: str, batches: list[Tensor]) -> None:
    settings, shape = settings_and_shape(**overrides)
    engine, other = (engine_of(build(shape, seed=1), settings, chosen_for=2) for _ in range(2))
    for one in (engine, other):
        accumulate(one, batches[0])
        one.update(0.01)
    ids, weight = batches[1], math.inf if how == "not finite" else 1.0
    engine.accumulate([ids[:2, :-1], ids[:2, 1:], torch.ones(2, LENGTH)], COUNT, BATCH)
    engine.accumulate([ids[2:, :-1], ids[2:, 1:], torch.full((2, LENGTH), weight)], COUNT, BATCH)
    if how == "not finite":
        assert not math.isfinite(engine.update(0.01))
    else:
        engine.update(0.01, accept=lambda _: False)
    assert engine.num_updates == 1
    for one in (engine, other):
        accumulate(one, batches[2])
    assert engine.update(0.01) == other.update(0.01) and engine.num_updates == 2
    expected = {
        name: tensor.clone() for part in (master_weights(other), optimizer_state(other)) for name, tensor in part
    }
    for name, tensor in [*master_weights(engine), *optimizer_state(engine)]:
        assert torch.equal(tensor, expected[name]), name
