"""DeepSpeed on two processes learns what one process learns: every family, ZeRO stage and optimizer."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from configs import RECIPE
from drawn_models import build
from engines import OF_A_LARGE_MODEL, open_with_weights, random_batch
from forked import answers_of

from zerokara.config.deepspeed_template import load_template
from zerokara.config.model import ARCHITECTURES
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import parallel
from zerokara.model.shapes import ModelShape
from zerokara.training.compute import zero
from zerokara.training.compute.optimizers import Optimizer, Place

VOCABULARY, STEPS, SKIPPED = 100, 6, 3
MODEL = {"num_layers": 2, "hidden_size": 32, "num_attn_heads": 4, "seq_len": 16, "gradient_clipping": 0.5}
MOE = {"num_experts": 4, "router_aux_loss_coef": 0.02, "router_z_loss_coef": 0.001}
STAGES, RATES = (1, 2, 3), {"adamw": 0.003, "adafactor": 0.02, "muon": 0.003}
SOONEST = ("llama", "t5")
"""A decoder and an encoder-decoder: the other families take minutes together, and are for CI."""
WHOLE = (*SOONEST, "mixtral")
"""Families of every pair of an optimizer and a stage."""


def lost_gradient() -> AbstractContextManager[Any]:
    """A rank's gradients do not reach the other."""
    accumulate = zero.ZeroEngine.accumulate

    def without(engine: zero.ZeroEngine, batch: list[torch.Tensor], tokens: float, sequences: float) -> torch.Tensor:
        return accumulate(engine, batch, tokens if parallel.data_rank() == 0 else 1e9, sequences)

    return mock.patch.object(zero.ZeroEngine, "accumulate", without)


def shifted_border() -> AbstractContextManager[Any]:
    """A number that is rank 0's last of a matrix is taken for the first of rank 1."""
    hold = Optimizer.hold

    def shifted(optimizer: Optimizer, places: dict[str, Place]) -> None:
        moved = {}
        for name, (tensor, start, (first, second)) in places.items():
            is_cut = len(first) > 1 and len(second) > 1
            ranges = [range(len(first) - 1), range(len(first) - 1, second.stop - 1)] if is_cut else [first, second]
            moved[name] = Place(tensor, start, ranges)
        hold(optimizer, moved)

    return mock.patch.object(Optimizer, "hold", shifted)


def clipped_too_late() -> AbstractContextManager[Any]:
    """Gradients are clipped when the optimizer has used them."""
    return mock.patch.object(zero.stage_1_and_2.DeepSpeedZeroOptimizer, "unscale_and_clip_grads", lambda *_: None)


TWINS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    **{each.__name__: each for each in (lost_gradient, shifted_border, clipped_too_late)},
}


def kinds_of(family: str) -> list[str]:
    """Runs on two processes: in fp32 every optimizer at every stage, and in bf16 one, in turn another of these.

    Of a family that is none of `WHOLE` each optimizer and each stage once, in turn another pairing.
    """
    place, names = list(ARCHITECTURES).index(family), list(RATES)
    pairs = [(name, stage) for name in names for stage in STAGES]
    if family not in WHOLE:
        pairs = [(name, STAGES[(place + index) % 3]) for index, name in enumerate(names)]
    return [*(f"fp32 {name} {stage}" for name, stage in pairs), f"bf16 {names[place % 3]} {STAGES[place // 3 % 3]}"]


def train(config: PretrainConfig, kinds: list[str], twin: str = "") -> dict[str, list[float]]:
    """Loss and norm of the gradient in each step of each kind of run."""
    found = {}
    for kind in kinds:
        number_format, optimizer, stage = kind.split()
        change = {"precision": number_format, "optimizer": optimizer, "zero_stage": int(stage), "lr": RATES[optimizer]}
        with TWINS[twin]():
            found[kind], num_updates = losses_of(config.model_copy(update=change))
            # A number that no rank takes for its own is whatever lies there, perhaps none: a twin may skip every step.
            assert twin or num_updates == STEPS - 1
    return found


def losses_of(config: PretrainConfig) -> tuple[list[float], int]:
    """Loss and norm of the gradient in each step, and the number of updates."""
    shape = ModelShape.from_config(config, VOCABULARY)
    model = build(shape, seed=1, settings=config)
    template = load_template("auto")
    template["zero_optimization"] |= OF_A_LARGE_MODEL
    engine = open_with_weights(model, config, template, torch.device("cpu"))
    generator, ranks, rank = torch.Generator().manual_seed(2), parallel.data_size(), parallel.data_rank()
    size, micro = config.global_batch, config.micro_batch
    batch = random_batch(shape, size, generator)  # always the same: it is learned by heart
    own = [part[rank::ranks] for part in batch]
    losses = []
    for step in range(STEPS):
        nats = torch.zeros(())
        for start in range(0, size // ranks, micro):
            arguments = [part[start : start + micro] for part in own]
            nats += engine.accumulate(arguments, float(batch[1].numel()), float(size)).float()
        torch.distributed.all_reduce(nats, group=parallel.data_group())
        norm = engine.update(float(config.lr), accept=lambda _, step=step: step != SKIPPED)
        losses += [float(nats) / batch[1].numel(), norm]
    return losses, engine.optimizer.num_updates


def settings_of(family: str) -> dict[str, Any]:
    every = ARCHITECTURES[family].moe_every
    experts = {**MOE, "moe_layers": "auto" if every == 1 else "[1]"} if every else {}
    # Two micro batches a step on each of two processes, but one where a further family would show nothing new.
    micro_batch_size = 2 if every or family == "llama" else 4
    batch = {"global_batch_size": 8, "micro_batch_size": micro_batch_size}
    # The twins are llama's, and are to show nothing else.
    return {**RECIPE, **MODEL, **experts, **batch, "architecture": family, "dropout": 0.1 * (family != "llama")}


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, python_path: None,
    warm_server: Path | None,
) -> dict[str, Any]:  # fmt: skip
    jobs: dict[str, dict[str, Any]] = {}
    asked_for = [item for item in request.session.items if item.path == request.path]
    families = {item.callspec.params.get("family", "llama") for item in asked_for}  # the twins are compared with llama
    for family in [name for name in ARCHITECTURES if name in families | {"llama"}]:
        together = kinds_of(family)
        alone = [*{f"{kind[:-1]}1": None for kind in together}]
        jobs[f"{family} 1"] = {**settings_of(family), "processes": 1, "more": {"kinds": alone}}
        jobs[f"{family} 2"] = {**settings_of(family), "processes": 2, "more": {"kinds": together}}
    for twin in TWINS:
        of_twin = {"kinds": ["fp32 muon 2"], "twin": twin}
        jobs[f"twin {twin}"] = {**settings_of("llama"), "processes": 2, "more": of_twin}
    answers = answers_of(train, jobs, tmp_path_factory.mktemp("engines"), warm_server)
    for ranks in answers.values():
        assert all(rank == ranks[0] for rank in ranks), "the losses and norms of all processes"
    return {name: ranks[0] for name, ranks in answers.items()}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in SOONEST else [pytest.mark.slow]) for name in ARCHITECTURES]
)
def test_two_processes_learn_what_one_learns(found: dict[str, Any], family: str) -> None:
    assert len(found[f"{family} 2"]) == (10 if family in WHOLE else 4)
    for kind, numbers in found[f"{family} 2"].items():
        one = found[f"{family} 1"][f"{kind[:-1]}1"]
        assert one[0] - one[-2] > 0.05, "nothing was learned: equality would mean nothing"
        if kind.startswith("fp32"):
            assert numbers == pytest.approx(one, rel=1e-5), kind
        else:  # what is rounded to bf16 are the weights; a norm feels each
            assert numbers[::2] == pytest.approx(one[::2], rel=5e-3), kind


@pytest.mark.parametrize("twin", TWINS)
def test_the_twins_are_caught(found: dict[str, Any], twin: str) -> None:
    numbers, one = found[f"twin {twin}"]["fp32 muon 2"], found["llama 1"]["fp32 muon 1"]
    apart = [abs(math.log(number / other)) for number, other in zip(numbers, one, strict=True)]
    # What is not a number is not near either.
    assert not all(each < 1e-4 for each in apart) if twin else all(each < 1e-5 for each in apart)
