from __future__ import annotations

import pytest
from configs import config_of

from zerokara.forecast import ladder
from zerokara.forecast.ladder import Rung
from zerokara.forecast.sizes import Speed

SIZES = ladder.shapes(config_of(seq_len=256), 4000)
SPEED = Speed(1e-5, 1e-11)


def seconds_of(rungs: list[Rung]) -> float:
    return sum(rung.seconds(SPEED) for rung in rungs)


@pytest.mark.parametrize("minutes", [5, 10, 30, 120, 1000])
def test_the_runs_take_the_time_that_there_is(minutes: float) -> None:
    rungs = ladder.climb(SIZES, SPEED, minutes * 60, unique_tokens=1e12)
    assert len(rungs) == 9 and seconds_of(rungs) == pytest.approx(minutes * 60, rel=0.01)
    assert len({rung.shape.hidden_size for rung in rungs}) == len({rung.tokens for rung in rungs}) == 3
    costs = [rung.tokens * SPEED.seconds_of_token(rung.shape) for rung in rungs]
    assert costs == sorted(costs)


def test_more_time_makes_the_runs_longer_and_the_sizes_larger() -> None:
    climbs = [ladder.climb(SIZES, SPEED, minutes * 60, 1e12) for minutes in (5, 10, 120, 1000)]
    widths = [max(rung.shape.hidden_size for rung in rungs) for rungs in climbs]
    assert widths == sorted(widths) and widths[0] < widths[-1]
    longest = max(climbs[-1], key=lambda rung: rung.tokens * rung.shape.hidden_size)
    assert longest.tokens >= ladder.MIN_TOKENS_PER_PARAMETER * longest.shape.num_parameters()


def test_no_token_is_read_twice() -> None:
    rungs = ladder.climb(SIZES, SPEED, 3600, unique_tokens=2e6)
    assert rungs and max(rung.tokens for rung in rungs) <= 2e6


def test_too_little_time_or_text_for_any() -> None:
    assert ladder.climb(SIZES, SPEED, 60, 1e12) == [] == ladder.climb(SIZES, SPEED, 3600, 1000)
