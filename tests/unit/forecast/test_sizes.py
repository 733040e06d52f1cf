from __future__ import annotations

import math

import pytest
from configs import config_of

from zerokara.config.architectures import SIZES
from zerokara.forecast.fit import MeasuredRun, ScalingLaw, fit
from zerokara.forecast.sizes import Budget, Candidate, candidate, fresh_worth, recommended
from zerokara.forecast.speed import Speed
from zerokara.model.shapes import ModelShape

SPEED = Speed(1e-5, 1e-11)
AUTO = {"num_layers": "auto", "hidden_size": "auto", "num_attn_heads": "auto", "seq_len": 256}
SHAPES = {name: ModelShape.from_config(config_of(model_size=name, **AUTO), 4000) for name in SIZES}


@pytest.fixture(scope="module")
def law() -> ScalingLaw:
    return fit(
        [
            MeasuredRun(size, length, 0.6 + 0.6 * (size / 1e6) ** -0.35 + 0.4 * (length / 1e7) ** -0.35)
            for size in (3e5, 1e6, 3e6)
            for length in (4e6, 1e7, 4e7)
        ]
    )


def candidates(
    law: ScalingLaw, hours: float = math.inf, tokens: float = math.inf, unique: float = 1e9
) -> list[Candidate]:
    budget = Budget(hours, tokens, unique, max_epochs=16)
    return [candidate(name, shape, (1e9, name != "13B"), SPEED, budget, law) for name, shape in SHAPES.items()]


@pytest.mark.parametrize("measured", [[(1e7, 1e-4), (1e8, 2e-3)], [(1e7, 1e-4), (1e8, 0.5e-4)]])
def test_no_part_of_a_speed_is_negative(measured: list[tuple[float, float]]) -> None:
    """Where the larger size is slower than in proportion, or faster than the smaller."""
    speed = Speed.of(*measured)
    assert speed.seconds_per_token >= 0 and speed.seconds_per_flop >= 0
    assert speed.seconds_of_token(SHAPES["1M"]) > 0


def test_repeated_tokens_are_worth_less_and_less() -> None:
    assert fresh_worth(5e8, 1e9) == 5e8 and fresh_worth(1e9, 1e9) == 1e9
    assert fresh_worth(4e9, 1e9) == pytest.approx(1e9 * (1 + 15.4 * (1 - math.exp(-3 / 15.4))))
    assert fresh_worth(4e9, 1e9) > 0.9 * 4e9 and fresh_worth(1e12, 1e9) < 16.5e9


def test_hours_become_tokens_and_tokens_hours(law: ScalingLaw) -> None:
    for each in candidates(law, hours=10):
        assert each.hours == pytest.approx(10) or each.epochs == 16
        assert each.tokens * SPEED.seconds_of_token(each.shape) == pytest.approx(each.hours * 3600)
    assert {each.tokens for each in candidates(law, tokens=1e8)} == {1e8}
    assert {each.epochs for each in candidates(law, hours=1e9, unique=1e6)} == {16}


def test_more_time_asks_for_a_larger_model(law: ScalingLaw) -> None:
    names = list(SIZES)
    chosen = [recommended(candidates(law, hours=hours, unique=1e12)) for hours in (0.05, 1, 20, 1000)]
    places = [names.index(each.name) for each in chosen if each]
    assert len(places) == 4 and places == sorted(places) and places[0] < places[-1]


def test_of_like_sizes_the_smaller_one_that_fits(law: ScalingLaw) -> None:
    found = candidates(law, hours=20)
    best = min((each for each in found if each.fits), key=lambda each: each.prediction.value)
    chosen = recommended(found)
    assert chosen and chosen.prediction.value <= 1.005 * best.prediction.value
    assert list(SIZES).index(chosen.name) <= list(SIZES).index(best.name)
    assert recommended([each for each in found if not each.fits]) is None
