"""A step that is skipped, matrices that are stacked, and how they are shared out."""

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from configs import config_of
from drawn_models import build
from engines import chains, engine_of, join_alone
from shapes import named
from torch import Tensor

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model.shapes import ModelShape, is_layer_matrix
from zerokara.training.compute import optimizer_rules, optimizers
from zerokara.training.compute.engine import Engine, master_weights, optimizer_state

BATCH, LENGTH, VOCAB = 4, 24, 300
SETTINGS: dict[str, Any] = {
    "hidden_size": 32, "num_kv_heads": 2, "ffn_hidden_size": 64, "seq_len": LENGTH, "global_batch_size": BATCH,
    "micro_batch_size": 2, "tie_word_embeddings": False, "init_std": 0.05, "muon_momentum": 0.9,
    "gradient_clipping": 0.5, "zero_stage": 1,
}  # fmt: skip
COUNT = float(BATCH * LENGTH)
FADED = 12, 20, 24, 30, 38
"""Powers of ten by which the momentum of an expert without tokens has faded."""


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    return chains(3, BATCH, LENGTH, VOCAB)


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
    assert engine.optimizer.num_updates == 1
    for one in (engine, other):
        accumulate(one, batches[2])
    assert engine.update(0.01) == other.update(0.01) and engine.optimizer.num_updates == 2
    expected = {
        name: tensor.clone() for part in (master_weights(other), optimizer_state(other)) for name, tensor in part
    }
    for name, tensor in [*master_weights(engine), *optimizer_state(engine)]:
        assert torch.equal(tensor, expected[name]), name


def test_equal_matrices_together_are_as_one_at_a_time(batches: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers' matrices, parts of matrices, and experts'."""
    settings, shape = settings_and_shape(optimizer="muon", architecture="qwen3_moe", num_experts=4, weight_decay=0.1)
    found, stacked = [], optimizers.STACK
    for size in (1, stacked):
        monkeypatch.setattr(optimizers, "STACK", size)
        engine = engine_of(build(shape, seed=1), settings)
        for ids in batches:
            accumulate(engine, ids)
            engine.update(1e-2)
        found.append({name: weight.clone() for name, weight in master_weights(engine)})
    begun = dict(build(shape, seed=1).named_parameters())
    for name, weight in found[0].items():
        moved = (weight - begun[name].detach()).norm()
        assert (found[1][name] - weight).norm() <= 1e-3 * moved, name


def test_four_rounds_bring_singular_values_near_to_1() -> None:
    """Those of more than 0.004 of the Frobenius norm, of square, wide and tall matrices, in fp32 and in bf16."""
    generator = torch.Generator().manual_seed(1)
    for rows, columns, dtype in itertools.product((48, 96), (48, 200), (torch.float32, torch.bfloat16)):
        drawn = torch.randn(rows, columns, generator=generator)
        left, values, right = torch.linalg.svd(drawn, full_matrices=False)
        steep = left * torch.logspace(0, -3, len(values)) @ right
        single, zeros = torch.outer(drawn[:, 0], drawn[0]), torch.zeros(rows, columns)
        matrices = torch.stack(
            [drawn, steep, 1e-6 * drawn, 1e6 * drawn, single, zeros, *(drawn * 10.0**-each for each in FADED)]
        ).to(dtype)
        before = torch.linalg.svdvals(matrices.float())
        found = torch.linalg.svdvals(optimizers._orthogonalized(matrices).float())
        large = found[:5][before[:5] > 0.004 * before[:5].norm(dim=1, keepdim=True)]
        assert found.isfinite().all() and found.max() < 1.25 and large.min() > 0.75
        assert not found[5].any() and found[7:].max() < 1e-5, "what has faded moves nothing"
        assert large.square().mean().sqrt() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("ranks", [2, 8])
def test_no_owner_has_much_more_work_than_the_mean(ranks: int) -> None:
    """Of 125M and 350M parameters beside the embedding, at stage 3, where every rank holds a part of each matrix."""
    for size in ("125M", "350M"):
        shape = ModelShape.from_config(
            config_of(model_size=size, num_layers="auto", hidden_size="auto", num_attn_heads="auto"), 32_000
        )
        shapes = {name: each for name, each in shape.parameter_shapes().items() if is_layer_matrix(name, each)}
        sizes = {name: math.prod(each) for name, each in shapes.items()}
        loads = Counter[int]()
        for name, owner in optimizer_rules.owners_of(sizes, dict.fromkeys(sizes, range(ranks)), ranks).items():
            loads[owner] += sizes[name] * min(shapes[name])  # as Muon's products
        assert max(loads.values()) <= 1.15 * loads.total() / ranks


def test_the_norm_of_many_numbers_is_right(batches: list[Tensor]) -> None:
    """torch's own, of all numbers of a tensor at once, is too small on a CPU: of an embedding of 4 million by 1e-4."""
    settings = config_of(**{**SETTINGS, "precision": "fp32", "gradient_clipping": 0.0})
    engine = engine_of(build(ModelShape.from_config(settings, 2**17), seed=1), settings)
    generator = torch.Generator().manual_seed(1)
    for weight in engine.module.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator)
    squares = sum(float(weight.grad.double().square().sum()) for weight in engine.module.parameters())
    assert engine.update(0.0) == pytest.approx(math.sqrt(squares), rel=2e-6)
