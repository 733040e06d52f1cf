"""The schedule against tables written out by hand."""

from __future__ import annotations

import pytest
from configs import config_of

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import UserError
from zerokara.training.planning import schedule as schedules
from zerokara.training.planning.schedule import Schedule

RECIPE = ("lr=0.001", "min_lr=0.0001", "lr_schedule=cosine", "warmup_fraction=0.02", "global_batch_size=32")
"""Instead of what the rules of the recipe would choose."""


def schedule(*overrides: str, samples: int = 1000) -> Schedule:
    config = load(PretrainConfig, "/dev/null", [*RECIPE, *overrides])
    return Schedule.from_config(config, config.lengths.raw, samples)


def test_length_from_epochs_and_from_tokens() -> None:
    auto = schedule("seq_len=16", "global_batch_size=10", "micro_batch_size=10", "epochs=2.5")
    assert (auto.num_steps, auto.num_tokens, auto.epochs_at(250)) == (250, 40_000, 2.5)
    given = schedule("seq_len=16", "global_batch_size=10", "micro_batch_size=10", "train_tokens=16000")
    assert (given.num_steps, given.epochs_at(100)) == (100, 1.0)


def test_length_from_the_stages_of_a_curriculum() -> None:
    settings = (*RECIPE, "seq_len=16", "global_batch_size=10", "micro_batch_size=10", "epochs=2.5")
    made = load(PretrainConfig, "/dev/null", list(settings))
    given = load(PretrainConfig, "/dev/null", [*settings, "train_tokens=16000"])

    def steps(which: PretrainConfig, *stages: int | None) -> int:
        return Schedule.from_config(which, which.lengths.raw, 1000, stages).num_steps

    assert steps(made, 300, 405) == 70  # what does not fill a step is left: there is nothing behind the last stage
    assert steps(made, 300, 408) == 70
    assert steps(made, 300, None) == 280  # the rest is `epochs` passes
    assert steps(given, 300, None) == 100 and steps(given, 300, 1000) == 100
    with pytest.raises(UserError, match=r"have 9 sequences of 16 together, fewer than global_batch_size = 10; give"):
        steps(made, 4, 5)


def test_one_epoch_is_one_epoch_within_a_batch() -> None:
    for samples in (33, 95, 1000, 1015, 1017):
        made = schedule(samples=samples)
        assert abs(made.epochs_at(made.num_steps) - 1) <= 32 / samples


TABLES = {
    # lr 1.0, min 0.1, 10 steps, 20 % warm-up: the value of each step.
    "linear": [0.5, 1.0, 0.8875, 0.775, 0.6625, 0.55, 0.4375, 0.325, 0.2125, 0.1],
    "constant": [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    "cosine": [0.5, 1.0, 0.965746, 0.868198, 0.722208, 0.55, 0.377792, 0.231802, 0.134254, 0.1],
    # From step 2 on 0.1 + 0.9·(√(2/n) - √0.2) / (1 - √0.2), by bc to nine digits.
    "inverse_sqrt": [0.5, 1.0, 0.701235, 0.523136, 0.401595, 0.311878, 0.242149, 0.185942, 0.139386, 0.1],
    "wsd": [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.7, 0.4, 0.1],  # the last 30 % are steps 8, 9, 10
}
TEN_STEPS = ("lr=1.0", "min_lr=0.1", "seq_len=1", "global_batch_size=1", "micro_batch_size=1", "train_tokens=10")


def rates(*overrides: str) -> list[float]:
    made = schedule(*TEN_STEPS, *overrides)
    return [made.learning_rate(step) for step in range(1, made.num_steps + 1)]


@pytest.mark.parametrize("kind", TABLES)
def test_learning_rate_table(kind: str) -> None:
    shape = (f"lr_schedule={kind}", "decay_fraction=0.3")
    assert rates(*shape, "warmup_fraction=0.2") == pytest.approx(TABLES[kind], abs=1e-6)
    assert rates(*shape, "warmup_fraction=0.7", "warmup_steps=2") == pytest.approx(TABLES[kind], abs=1e-6)
    assert rates(*shape, "warmup_steps=2", "train_tokens=500", "max_steps=10") == pytest.approx(TABLES[kind], abs=1e-6)


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 1000])
def test_the_last_step_has_min_lr(kind: str, steps: int) -> None:
    for warmup in ("warmup_fraction=0", "warmup_fraction=0.5", "warmup_fraction=0.02"):
        made = rates(f"lr_schedule={kind}", f"train_tokens={steps}", warmup, "min_lr=0.25")
        assert len(made) == steps and max(made) <= 1.0 and min(made[:-1], default=1) > 0
        expected = 1.0 if kind == "constant" or (kind == "inverse_sqrt" and steps == 1) else 0.25
        assert made[-1] == pytest.approx(expected, rel=1e-12)
        assert made == sorted(made[: made.index(max(made))]) + sorted(made[made.index(max(made)) :], reverse=True)


def test_inverse_sqrt_is_t5s_where_min_lr_is_what_that_reaches() -> None:
    made = rates("lr_schedule=inverse_sqrt", "train_tokens=400", "warmup_steps=4", "min_lr=0.1")  # √(4/400)
    assert made[3:] == pytest.approx([(4 / step) ** 0.5 for step in range(4, 401)])


def test_without_warmup_the_first_step_is_not_wasted() -> None:
    made = schedule("warmup_fraction=0", "lr=1.0", "min_lr=0.1", "lr_schedule=linear", "train_tokens=81920")
    assert made.num_steps == 10 and made.warmup_steps == 0
    assert made.learning_rate(1) == pytest.approx(0.91)


@pytest.mark.parametrize(
    ("overrides", "key", "value", "remedy"),
    [
        (("warmup_steps=10",), "warmup_steps", 10, "try 0"),
        (("warmup_steps=6", "lr_schedule=wsd", "decay_fraction=0.5"), "decay_fraction", 0.5, "at most 0.4"),
        (("warmup_fraction=0.6", "lr_schedule=wsd", "decay_fraction=0.5"), "decay_fraction", 0.5, "at most 0.4"),
    ],
)
def test_a_warmup_or_decay_that_does_not_fit_is_refused_with_the_most_that_does(
    overrides: tuple[str, ...], key: str, value: float, remedy: str
) -> None:
    with pytest.raises(UserError) as caught:
        schedule(*TEN_STEPS, *overrides)
    (fault,) = caught.value.faults
    assert (fault.where, fault.key, fault.value) == ("--set", key, value) and remedy in fault.remedy


def test_shares_that_fill_the_run_are_no_fault() -> None:
    assert rates("lr_schedule=wsd", "warmup_fraction=0.7", "decay_fraction=0.3") == pytest.approx(
        [step / 7 for step in range(1, 8)] + [0.7, 0.4, 0.1]
    )
    assert rates("lr_schedule=wsd", "warmup_fraction=0.65", "decay_fraction=0.35")[-1] == pytest.approx(0.1)


def test_the_earliest_limit_ends_the_run() -> None:
    def steps(*overrides: str) -> int:
        return schedule("seq_len=16", "global_batch_size=10", "micro_batch_size=10", *overrides).num_steps

    assert steps("epochs=2") == 200 and steps("epochs=2", "max_steps=150") == 150
    assert steps("train_tokens=16000", "max_steps=150") == 100


def test_hours_are_counted_over_all_starts_and_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(schedules.STARTED_NAME, "1000")

    def reason(now: float, trained: float, **settings: float) -> str:
        monkeypatch.setattr("time.time", lambda: now)
        return schedules.reason_to_stop(config_of(**settings), int(2e9), trained)

    assert reason(now=1e9, trained=1e9) == ""
    almost = 1000 + 3600 - 51
    assert reason(almost, 7199, max_hours=2, max_hours_per_start=1) == ""
    assert reason(almost, 7200, max_hours=2).startswith("max_hours = 2")
    found = reason(almost + 2, 7200, max_hours_per_start=1)  # 2 GB take 20 s at 100 MB/s, and leaving takes 30
    assert found.startswith("max_hours_per_start = 1") and "49.0 s" in found


def test_limits_that_leave_no_time_to_train_are_refused() -> None:
    both = config_of(max_hours=2, max_hours_per_start=0.1)
    assert not list(schedules.hours_faults(both, int(1e9), trained_seconds=7199, take=""))
    (used_up,) = schedules.hours_faults(config_of(max_hours=2), 0, 7205, take="bash convert.sh")
    assert (used_up.key, used_up.value) == ("max_hours", 2.0) and "bash convert.sh" in used_up.remedy
    (short,) = schedules.hours_faults(config_of(max_hours_per_start=0.01), int(1e9), 0, take="")
    assert (short.key, short.value) == ("max_hours_per_start", 0.01) and "40.0 s" in short.rule
