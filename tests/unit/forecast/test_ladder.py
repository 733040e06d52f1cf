from __future__ import annotations

import pytest
from configs import config_of

from zerokara.forecast import ladder
from zerokara.forecast.ladder import Means, Rung
from zerokara.forecast.seats import makespan
from zerokara.forecast.sizes import Speed

SIZES = ladder.shapes(config_of(seq_len=256), 4000)
SPEED = Speed(1e-5, 1e-11)


def climb(minutes: float, unique_tokens: float = 1e12, num_seats: int = 1) -> list[Rung]:
    return ladder.climb(SIZES, SPEED, Means(minutes * 60, num_seats, unique_tokens, eval_tokens=50_000))


@pytest.mark.parametrize("num_seats", [1, 2, 4, 9])
@pytest.mark.parametrize("minutes", [15, 30, 120, 1000])
def test_the_runs_take_the_time_that_there_is(minutes: float, num_seats: int) -> None:
    rungs = climb(minutes, num_seats=num_seats)
    seconds = [rung.seconds(SPEED) for rung in rungs]
    assert len(rungs) == 9 and makespan(seconds, num_seats) == pytest.approx(minutes * 60, rel=0.01)
    assert len({rung.shape.hidden_size for rung in rungs}) == len({rung.tokens for rung in rungs}) == 3
    assert rungs[0].tokens == max(rung.tokens for rung in rungs) and seconds[0] == max(seconds)


def test_more_time_makes_the_runs_longer_and_the_sizes_larger() -> None:
    climbs = [climb(minutes) for minutes in (15, 30, 120, 1000)]
    widths = [max(rung.shape.hidden_size for rung in rungs) for rungs in climbs]
    assert widths == sorted(widths) and widths[0] < widths[-1]
    longest = max(climbs[-1], key=lambda rung: rung.tokens * rung.shape.hidden_size)
    assert longest.tokens >= ladder.MIN_TOKENS_PER_PARAMETER * longest.shape.num_parameters()


def test_no_token_is_read_twice() -> None:
    rungs = climb(60, unique_tokens=2e6)
    assert rungs and max(rung.tokens for rung in rungs) <= 2e6


def test_too_little_time_or_text_for_any() -> None:
    least = ladder.least_seconds(SIZES, SPEED, Means(60, 1, 1e12, 50_000)) / 60
    assert climb(0.99 * least) == [] and climb(1.01 * least)
    assert climb(1) == [] == climb(60, unique_tokens=1000)


def test_a_validation_is_that_of_the_run_but_for_its_time() -> None:
    assert ladder.eval_tokens(config_of(), 30_000) == 30_000
    assert ladder.eval_tokens(config_of(eval_tokens=5000), 30_000) == 5000
    assert ladder.eval_tokens(config_of(), 10**9) == ladder.MAX_EVAL_TOKENS


def test_the_batch_is_that_of_the_recipe_before_it_is_made_a_power_of_two() -> None:
    batches = {length: Rung({}, SIZES[0], length, 0).batch for length in (10**3, 2_000_000, 3_000_000, 10_000_000)}
    assert batches == {10**3: ladder.MIN_BATCH, 2_000_000: 9, 3_000_000: 11, 10_000_000: 23}
