"""On a GPU, in bf16: every stage and optimizer learns where it can run; offload moves the state and changes no loss."""

from typing import Any

import pytest
import torch
from configs import config_of
from drawn_models import build
from engines import engine_of
from gpu_device import DEVICE, PRECISION, REHEARSED
from shapes import named

from zerokara.model import weight_gradients
from zerokara.model.float8 import product
from zerokara.model.shapes import ModelShape, is_layer_matrix
from zerokara.training.compute.engine import Engine, load_state, master_weights, optimizer_state

pytestmark = pytest.mark.gpu


def engine_for(chosen_for: int = 1, **overrides: Any) -> Engine:
    model = {"hidden_size": 128, "num_kv_heads": 2, "seq_len": 64, "precision": PRECISION}
    settings = config_of(**{**model, **overrides})
    return engine_of(build(ModelShape.from_config(settings, 1000), seed=1), settings, chosen_for)


def train(engine: Engine, num_steps: int, learning_rate: float) -> list[float]:
    ids = torch.randint(0, 1000, (8, 65), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    losses = []
    for _ in range(num_steps):
        nats = 0.0
        for part in ids.split(4):
            nats += engine.accumulate([part[:, :-1], part[:, 1:], torch.ones(4, 64, device=DEVICE)], 512.0, 8).item()
        losses.append(nats / 512)
        engine.update(learning_rate)
    return losses


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
def test_the_first_loss_is_that_of_guessing(architecture: str) -> None:
    heads = "auto" if architecture == "gpt2" else 2
    (loss,) = train(engine_for(architecture=architecture, num_kv_heads=heads), 1, 0.0)
    assert loss == pytest.approx(6.9, abs=0.2)  # log(1000) nats a token


@pytest.mark.parametrize(
    ("optimizer", "zero_stage", "num_steps", "learning_rate", "learned"),
    [
        *[("adamw", zero_stage, 20, 1e-3, 0.5) for zero_stage in (1, 2, 3)],
        *[("adafactor", zero_stage, 30, 0.05, 0.3) for zero_stage in (1, 3)],
        *[("muon", zero_stage, 30, 1e-3, 0.3) for zero_stage in (1, 3)],
    ],
)
def test_bf16_learns(optimizer: str, zero_stage: int, num_steps: int, learning_rate: float, learned: float) -> None:
    """Under DeepSpeed, which a lone process does without."""
    engine = engine_for(chosen_for=2, optimizer=optimizer, zero_stage=zero_stage)
    losses = train(engine, num_steps, learning_rate)
    assert losses[-1] < losses[0] - learned


@pytest.mark.parametrize(("zero_stage", "offload"), [(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "all")])
def test_offload_moves_the_state_and_changes_no_loss(zero_stage: int, offload: str) -> None:
    plain, away = engine_for(zero_stage=zero_stage), engine_for(zero_stage=zero_stage, offload=offload)
    expected = train(plain, 10, 1e-3)
    assert expected[-1] < expected[0] - 0.2
    assert train(away, 10, 1e-3) == pytest.approx(expected, abs=2e-3)  # the norm is added up in another order
    states = away.optimizer.state.values()
    assert {state["exp_avg"].device.type for state in states} == {"cpu"}


@pytest.mark.parametrize(
    "overrides", [{"zero_stage": 2, "offload": "optimizer"}, {"optimizer": "muon", "zero_stage": 0}], ids=named
)
def test_the_state_goes_out_and_in(overrides: dict[str, Any]) -> None:
    first, second = engine_for(**overrides), engine_for(**overrides)
    train(first, 3, 1e-3)
    weights = {name: tensor.cpu().clone() for name, tensor in master_weights(first)}
    moments = {name: tensor.cpu().clone() for name, tensor in optimizer_state(first)}
    load_state(second, weights.items(), moments, first.optimizer.num_updates)
    for name, tensor in [*master_weights(second), *optimizer_state(second)]:
        assert torch.equal(tensor.cpu(), (weights if name in weights else moments)[name]), name
    assert train(second, 3, 1e-3) == pytest.approx(train(first, 3, 1e-3), abs=2e-3)


def test_gradients_that_products_add_up_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the rounding of each to bf16, which torch does before it adds them."""
    found = []
    for adds in (True, False):
        with monkeypatch.context() as patched:
            if REHEARSED or not adds:
                patched.setattr(weight_gradients, "adds_in_fp32", lambda *_, adds=adds: adds)
            engine = engine_for(precision="bf16", global_batch_size=8, micro_batch_size=4)
        with monkeypatch.context() as patched:
            patched.setattr(engine, "update", lambda _: None)
            train(engine, 1, 0.0)
        gradients = {name: place.tensor.grad for name, place in engine.optimizer._places.items()}
        found.append({name: each for name, each in gradients.items() if is_layer_matrix(name, each.shape)})
    summed, plain = found
    assert len(summed) == 8
    for name, each in plain.items():
        assert each.norm() > 0 and (summed[name] - each).norm() < 0.01 * each.norm(), name


def test_products_in_float8_are_those_of_a_cpu() -> None:
    """Up to the largest numbers: in whatever order cuBLASLt multiplies by the scales."""
    if not REHEARSED and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 needs a GPU of Ada, Hopper or later")
    inputs, weight, gradient = (torch.randn(size, dtype=torch.bfloat16) for size in ((32, 64), (48, 64), (32, 48)))
    huge = torch.full((32, 64), 3e38, dtype=torch.bfloat16)
    for left, right in ((inputs, weight), (huge, torch.eye(48, 64, dtype=torch.bfloat16))):
        found, expected = (
            (*torch.autograd.grad(product(*leaves), leaves, (gradient * 1e-09).to(device)), product(*leaves))
            for device in (DEVICE, torch.device("cpu"))
            for leaves in [[each.to(device).requires_grad_() for each in (left, right)]]
        )
        for one, other in zip(found, expected, strict=True):
            assert other.isfinite().all()
            torch.testing.assert_close(one.cpu(), other, rtol=2**-7, atol=2**-9 * other.abs().max().item())
