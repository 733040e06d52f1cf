"""Speed of a machine, plans that differ from the user's configuration, and sizes that fit hours, tokens and memory."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from configs import config_of

from zerokara.base.errors import UserError
from zerokara.config.model import SIZES
from zerokara.forecast.fit import MeasuredRun, ScalingLaw, SmallRuns, fit
from zerokara.forecast.sizes import (
    LEFT_TO_RECIPE,
    Candidate,
    Outlook,
    Planner,
    Speed,
    candidate,
    recommended,
    size_settings,
)
from zerokara.model.shapes import ModelShape

SPEED = Speed(1e-5, 1e-11)
AUTO = {"num_layers": "auto", "hidden_size": "auto", "num_attn_heads": "auto", "seq_len": 256}
SHAPES = {name: ModelShape.from_config(config_of(model_size=name, **AUTO), 4000) for name in SIZES}


@pytest.fixture(scope="module")
def law() -> ScalingLaw:
    sizes = [(size, length) for size in (3e5, 1e6, 3e6) for length in (4e6, 1e7, 4e7)]
    return fit(
        [MeasuredRun(*each, 0.6 + 0.6 * (each[0] / 1e6) ** -0.35 + 0.4 * (each[1] / 1e7) ** -0.35) for each in sizes]
    )


def candidates(
    law: ScalingLaw, hours: float = math.inf, tokens: float = math.inf, unique: float = 1e9, validation: float = 0.0
) -> list[Candidate]:
    def outlook(name: str, tokens: float) -> Outlook:
        return Outlook(1e9, name != "13B", 100, validation)

    limits = hours, min(tokens, 16 * unique)
    return [candidate(name, shape, outlook, SPEED, law.predict, limits, unique) for name, shape in SHAPES.items()]


@pytest.mark.parametrize("measured", [[(1e7, 1e-4), (1e8, 2e-3)], [(1e7, 1e-4), (1e8, 0.5e-4)]])
def test_no_part_of_a_speed_is_negative(measured: list[tuple[float, float]]) -> None:
    """Where the larger size is slower than in proportion, or faster than the smaller."""
    speed = Speed.of(*measured)
    assert speed.seconds_per_token >= 0 and speed.seconds_per_flop >= 0
    assert speed.seconds_of_token(SHAPES["1M"]) > 0


def test_hours_become_tokens_and_tokens_hours(law: ScalingLaw) -> None:
    for each in candidates(law, hours=10):
        assert each.hours == pytest.approx(10) or each.epochs == 16
        assert each.tokens * SPEED.seconds_of_token(each.shape) == pytest.approx(each.hours * 3600)
    assert {each.tokens for each in candidates(law, tokens=1e8)} == {1e8}
    assert {each.epochs for each in candidates(law, hours=1e9, unique=1e6)} == {16}
    alone, validated = (candidates(law, hours=10, unique=1e12, validation=share) for share in (0, 0.25))
    for one, other in zip(alone, validated, strict=True):
        assert (other.hours, other.tokens) == pytest.approx((10, one.tokens / 1.25))


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


def test_little_text_and_many_hours_ask_for_a_larger_model_than_the_rule_of_thumb() -> None:
    """0.8 million tokens, which read 16 times are worth 8.5 million fresh ones."""

    def chosen(tokens: float) -> str:
        there: Any = (lambda *_: Outlook(1e9, True, 100, 0.0), SPEED, None, (math.inf, tokens), 8e5)
        best = recommended([candidate(name, shape, *there) for name, shape in SHAPES.items()])
        return best.name if best else ""

    assert SHAPES["3M"].num_parameters() < 8.5e6 / 2.5 < SHAPES["5M"].num_parameters()
    assert [chosen(epochs * 8e5) for epochs in (4, 11, 16)] == ["1M", "1M", "3M"]


@pytest.fixture
def planner(tiny_data: dict[str, str], tmp_path: Path) -> Planner:
    return Planner(Path(tiny_data["config"]), (f"output_model_dir={tmp_path / 'run'}", "precision=fp32"))


def test_a_size_takes_the_place_of_the_users(planner: Planner) -> None:
    local = planner.local_plan(**size_settings("3M"))
    assert (local.shape.num_layers, local.shape.hidden_size) == (5, 192)
    assert planner.local_plan().shape.hidden_size == 48  # the configuration's own
    of_experts = planner.config(**size_settings("1M"), architecture="t5_moe").resolved_sizes()
    assert of_experts["num_layers"] == 2 and of_experts["moe_layers"] == (1,), "of every fourth the last"
    with pytest.raises(UserError, match="model_size"):
        planner.config(hidden_size="auto")


def test_the_steps_of_few_tokens_are_few(planner: Planner) -> None:
    """Not those of the fewest tokens that a batch is planned for."""
    shape = ModelShape.from_config(planner.config(**size_settings("1M")), 500)
    made = [
        candidate("1M", shape, planner.outlook, Speed(1e-6, 0), None, (math.inf, tokens), 1e5) for tokens in (1000, 1e5)
    ]
    assert made[0].steps <= 2 < made[1].steps < 1e5 / 256


def test_the_memory_of_a_student_counts_its_teachers(planner: Planner) -> None:
    alone = planner.outlook("3M", 1e6).memory_bytes
    of_four = replace(planner, teachers=4).outlook("3M", 1e6).memory_bytes
    plan = planner.local_plan(**size_settings("3M"), **LEFT_TO_RECIPE, train_tokens=10**6)
    expected = 4 * 4 * plan.shape.num_parameters() * plan.num_processes
    assert of_four - alone == pytest.approx(expected, rel=0.01), "in fp32, of each process"


@pytest.mark.parametrize(
    ("given", "batch"),
    [(("num_processes=3", "global_batch_size=24"), 15), (("seq_len=2000", "global_batch_size=1"), None)],
)
def test_the_measured_batch_is_one_that_the_processes_and_the_text_can_have(
    tiny_data: dict[str, str], given: tuple[str, ...], batch: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zerokara.forecast.sizes.available_cores", lambda: 2)
    planner, asked = (
        Planner(Path(tiny_data["config"]), ("precision=fp32", "micro_batch_size=auto", *given)),
        list[int](),
    )

    def measured(self: Planner, settings: dict[str, Any]) -> tuple[float, float]:
        asked.append(settings["global_batch_size"])
        return float(len(asked)), float(len(asked))

    monkeypatch.setattr(Planner, "measure", measured)
    planner.measure_speed()
    samples = planner.local_plan().schedule.samples_per_epoch
    assert asked == [batch or int(samples)] * 2 and (batch or samples < 16)


def test_what_does_not_fit_is_seen(planner: Planner) -> None:
    small, large = planner.outlook("1M", 1e6), planner.outlook("13B", 1e6)
    assert small.fits and not large.fits and large.memory_bytes > 13e9 * 12 > small.memory_bytes


def test_the_time_of_all_validations_is_counted(tiny_data: dict[str, str]) -> None:
    """Two thirds of a training token each: at the start, every ten steps, and at the end."""
    shares = []
    for wanted in ("all", "1000"):
        given = ("precision=fp32", "eval_interval=10", f"eval_tokens={wanted}")
        planner = Planner(Path(tiny_data["config"]), given)
        there = planner.local_plan().data.num_valid_tokens
        seen = planner.outlook("1M", 1e6)
        times = 1 + math.ceil(seen.steps / 10)
        assert seen.validation == pytest.approx(2 / 3 * times * (there if wanted == "all" else 1000) / 1e6)
        shares.append(seen.validation)
    assert shares[0] > shares[1] > 0


def test_the_memory_of_a_size_is_that_of_its_own_batch(tiny_data: dict[str, str]) -> None:
    """With the batch that the plan will write, not the present one, which is of four sequences here."""
    planner = Planner(Path(tiny_data["config"]), ("global_batch_size=4", "precision=fp32"))
    present, written = (
        planner.local_plan(**size_settings("1M"), **more).memory.pools[0].needed_bytes
        for more in ({}, {**LEFT_TO_RECIPE, "train_tokens": 10**7, "micro_batch_size": "auto"})
    )
    assert planner.outlook("1M", 1e7)[:2] == (written, True) and written > 1.1 * present


def test_a_small_run_is_one_process_with_the_optimizer_of_the_large_one(tiny_data: dict[str, str]) -> None:
    given = ("tensor_parallel_size=2", "num_processes=2", "micro_batch_size=2", "precision=fp32")
    planner = Planner(Path(tiny_data["config"]), given)
    assert SmallRuns(planner, Path()).settings["optimizer"] == "adamw"  # Muon needs whole matrices
    small = planner.local_plan(**SmallRuns(planner, Path()).settings)
    assert (small.num_processes, small.resolved.tensor_parallel_size, small.resolved.optimizer) == (1, 1, "adamw")
    assert SmallRuns(Planner(Path(tiny_data["config"]), ()), Path()).settings["optimizer"] == "muon"


def test_a_law_holds_for_one_kind_of_run(tiny_data: dict[str, str]) -> None:
    def folder(*given: str) -> Path:
        return SmallRuns(Planner(Path(tiny_data["config"]), ("precision=fp32", *given)), Path()).folder

    same = ("lr=0.5", "num_layers=3", "train_tokens=1000", "output_model_dir=elsewhere", "save_interval=7")
    assert {folder(each) for each in same} == {folder()}
    others = ("dropout=0.3", "seed=5", "intra_document_masking=true", "tie_word_embeddings=false", "seq_len=16")
    assert len({folder(), *map(folder, others)}) == 1 + len(others)
