"""The schedule against tables written out by hand, and the table of sources against what is really read."""

from pathlib import Path

import numpy as np
import pytest
from configs import fault_of
from token_sources import consumption_of, data_plan, settings, some_lengths, write_sources

from zerokara.base.errors import Fault, UserError
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.training.planning import schedule as schedules
from zerokara.training.planning.schedule import Schedule, extent_of, table_lines

RECIPE = ("lr=0.001", "min_lr=0.0001", "lr_schedule=cosine", "warmup_fraction=0.02", "global_batch_size=32")
"""Instead of what the rules of the recipe would choose."""


def schedule(*overrides: str, samples: int = 1000) -> Schedule:
    config = load(PretrainConfig, "/dev/null", [*RECIPE, *overrides])
    return Schedule.from_config(config, config.lengths.raw, samples)


@pytest.mark.parametrize(
    ("overrides", "steps", "epochs"),
    [
        (("epochs=2.5",), 250, 2.5),
        (("train_tokens=16000",), 100, 1.0),
        (("epochs=2", "max_steps=150"), 150, 1.5),
        (("train_tokens=16000", "max_steps=150"), 100, 1.0),
    ],
)
def test_the_earliest_limit_ends_the_run(overrides: tuple[str, ...], steps: int, epochs: float) -> None:
    made = schedule("seq_len=16", "global_batch_size=10", "micro_batch_size=10", *overrides)
    assert (made.num_steps, made.num_tokens, made.epochs) == (steps, 160 * steps, epochs)


@pytest.mark.parametrize(
    ("batch", "epochs", "samples", "fitting"), [(16, 3, 1, "3"), (16, 0.5, 4, "2"), (99, 1, 80, "80")]
)
def test_a_step_that_reads_more_epochs_than_the_run_is_refused(
    batch: int, epochs: float, samples: int, fitting: str
) -> None:
    settings = (f"epochs={epochs}", "micro_batch_size=auto")
    fault = fault_of(schedule, f"global_batch_size={batch}", *settings, samples=samples)
    assert (fault.key, fault.value) == ("global_batch_size", batch) and f"try {fitting}, " in fault.remedy
    assert schedule(f"global_batch_size={fitting}", *settings, samples=samples).num_steps == 1
    assert schedule("global_batch_size=20", "epochs=0.1", "micro_batch_size=auto", samples=80).num_steps == 1


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
@pytest.mark.parametrize("steps", [1, 2, 1000])
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


@pytest.mark.parametrize(
    ("overrides", "key", "value", "remedy"),
    [
        (("warmup_steps=10",), "warmup_steps", 10, "try 0"),
        (("warmup_steps=6", "lr_schedule=wsd", "decay_fraction=0.5"), "decay_fraction", 0.5, "at most 0.4"),
        (("warmup_fraction=0.6", "lr_schedule=wsd", "decay_fraction=0.5"), "decay_fraction", 0.5, "at most 0.4"),
    ],
)
def test_a_warmup_or_decay_that_does_not_fit(overrides: tuple[str, ...], key: str, value: float, remedy: str) -> None:
    fault = fault_of(schedule, *TEN_STEPS, *overrides)
    assert (fault.where, fault.key, fault.value) == ("--set", key, value) and remedy in fault.remedy


TOTALS = (803, 4005, 330)  # 100, 500 and 41 sequences of 8
STAGES = "stages=[{tokens: 9600, source_weights: [3, 1, 0]}, {name: finish, tokens: rest, source_weights: [0, 1, 1]}]"
BATCH = ("seq_len=8", "global_batch_size=16", "micro_batch_size=4")
LINEAR = ("lr=0.001", "min_lr=0", "lr_schedule=linear", "warmup_fraction=0.02")


@pytest.fixture
def made(tmp_path: Path):  # type: ignore[no-untyped-def]
    owner = write_sources(tmp_path, some_lengths(2, TOTALS))

    def make(*overrides: str) -> tuple[PretrainConfig, dict]:
        return settings(tmp_path, 3, *BATCH, *LINEAR, *overrides), owner

    return make


def lines_of(config: PretrainConfig) -> list[str]:
    planned = Schedule.from_config(config, *extent_of(data_plan(config)))
    return list(table_lines(data_plan(config), planned, consumption_of(config)))


def epochs_faults(config: PretrainConfig) -> list[Fault]:
    return list(schedules.epochs_faults(config, consumption_of(config).sources))


def really_read(config: PretrainConfig, owner: dict, num_samples: int) -> list[int]:
    plan = data_plan(config)
    epochs, indices = plan.order().at_many(np.arange(num_samples))
    inputs = plan.tokens().many(indices, epochs)[:, :-1].ravel().tolist()
    sources = [owner[token][0] for token in inputs]
    return [sources.count(source) for source in range(3)]


@pytest.mark.parametrize(
    "overrides",
    [
        (STAGES, "train_tokens=25600"),
        (STAGES, "train_tokens=6400"),  # ends in the first stage
        (STAGES, "train_tokens=9600", "order=sequential"),
        ("train_tokens=7680", "order=sequential"),
        ("train_tokens=5136", "global_batch_size=2", "micro_batch_size=2", "seed=5"),  # a whole pass
    ],
)
def test_the_table_has_the_tokens_that_are_read(made, overrides: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    config, owner = made(*overrides)
    table = consumption_of(config)
    expected = really_read(config, owner, config.train_tokens // 8)
    assert [use.used_tokens for use in table.sources] == expected and table.is_exact
    assert [use.available_tokens for use in table.sources] == list(TOTALS)
    if config.stages:
        for source in range(3):
            assert sum(stage[source].used_tokens for stage in table.stages) == expected[source]


def test_a_part_of_a_shuffled_stream_has_shares(made) -> None:  # type: ignore[no-untyped-def]
    assert not consumption_of(made("train_tokens=10272")[0]).is_exact, "the second epoch is cut elsewhere"
    config, owner = made("train_tokens=2560")
    table = consumption_of(config)
    assert not table.is_exact and "about 1,996" in "\n".join(lines_of(config))
    taken = [use.used_tokens for use in table.sources]
    assert taken == [400, 1996, 163]
    assert really_read(config, owner, 320) == pytest.approx(taken, rel=0.2)


def test_a_stage_that_is_never_reached_is_a_warning_with_numbers(made) -> None:  # type: ignore[no-untyped-def]
    def warnings(*settings: str) -> list[str]:
        return [line for line in lines_of(made(*settings)[0]) if "warning" in line]

    for limit in ("train_tokens=9600", "max_steps=70", "epochs=0.001"):
        end = sum(use.used_tokens for use in consumption_of(made(STAGES, limit)[0]).sources)
        (line,) = warnings(STAGES, limit)
        assert "9,600 tokens" in line and f" {end:,};" in line
    assert not warnings(STAGES, "train_tokens=9728")  # one step further
    assert not warnings("source_weights=[1, 2, 3]", "train_tokens=128")


def test_too_many_epochs_are_refused_with_the_tables_numbers(made) -> None:  # type: ignore[no-untyped-def]
    config, _ = made(STAGES, "train_tokens=9600", "order=sequential", "max_epochs_per_source=8.5")
    (fault,) = epochs_faults(config)
    assert (fault.key, fault.value) == ("max_epochs_per_source", 8.5)
    assert all(number in fault.rule for number in ("a.jsonl", "803", "7,200", "9.00"))
    assert "6,800" in fault.remedy and "max_epochs_per_source: 9" in fault.remedy
    config, _ = made(STAGES, "train_tokens=9600", "order=sequential", "max_epochs_per_source=9")
    assert not epochs_faults(config)


def test_a_plan_at_the_limit_of_epochs_may_round_its_last_step(made) -> None:  # type: ignore[no-untyped-def]
    """641 sequences, 16 times, are 641 steps of 16: exact; in steps of 48 they are 214, of 10,272 sequences."""
    for batch, epochs in ((16, 16), (48, 16), (48, 4.03)):
        more = f"global_batch_size={batch}", "micro_batch_size=1", f"max_epochs_per_source={epochs}"
        config, _ = made(*more, f"epochs={epochs}")
        assert not epochs_faults(config), (batch, epochs)
        reading = data_plan(config)
        most = reading.tokens_of(epochs)
        assert not epochs_faults(made(*more, f"train_tokens={most}")[0])
        assert epochs_faults(made(*more, f"train_tokens={most + 2 * batch * 8}")[0])


def test_tokens_are_read_again_as_soon_as_one_source_is_read_whole(made) -> None:  # type: ignore[no-untyped-def]
    plan = data_plan(
        made("stages=[{tokens: 800, source_weights: [1, 0, 0]}, {source_weights: [0, 1, 0], tokens: rest}]")[0]
    )
    assert plan.tokens_of(1) == 8 * sum(plan.samples_per_part[:2]), "the first is read once, and not again"
    staged = "stages=[{tokens: 240, source_weights: [0, 1, 0]}, {tokens: rest, source_weights: [3, 2, 0]}]"
    for mixture, expected in (("source_weights=[3, 1, 1]", int(100 * 5 / 3)), (staged, 30 + int(100 * 5 / 3))):
        unique = data_plan(made(mixture, "train_tokens=1600")[0]).tokens_of(1)
        assert unique == expected * 8  # of the first, three of five; all sources have as many samples or more
        for tokens, is_again in ((unique - 64, False), (unique + 64, True)):
            more = f"train_tokens={tokens}", "global_batch_size=1", "micro_batch_size=1", "order=sequential"
            uses = consumption_of(made(mixture, *more)[0]).sources
            assert (max(use.epochs for use in uses) > 1) is is_again
