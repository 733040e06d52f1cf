"""The schedule against tables written out by hand."""

from __future__ import annotations

import pytest

from zerokara import config
from zerokara.errors import UserError
from zerokara.training.schedule import Schedule


def schedule(*overrides: str, samples: int = 1000) -> Schedule:
    return Schedule.from_config(config.load(config.PretrainConfig, "/dev/null", list(overrides)), samples)


def test_length_from_epochs_and_from_tokens() -> None:
    auto = schedule("seq_len=16", "global_batch_size=10", "micro_batch_size=10", "epochs=2.5")
    assert (auto.num_steps, auto.num_tokens, auto.epochs_at(250)) == (250, 40_000, 2.5)
    given = schedule("seq_len=16", "global_batch_size=10", "micro_batch_size=10", "train_tokens=16000")
    assert (given.num_steps, given.epochs_at(100)) == (100, 1.0)


def test_length_from_the_stages_of_a_curriculum() -> None:
    settings = ("seq_len=16", "global_batch_size=10", "micro_batch_size=10", "epochs=2.5")
    made = config.load(config.PretrainConfig, "/dev/null", list(settings))
    given = config.load(config.PretrainConfig, "/dev/null", [*settings, "train_tokens=16000"])

    def steps(which: config.PretrainConfig, *stages: int | None) -> int:
        return Schedule.from_config(which, 1000, stages).num_steps

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
}


@pytest.mark.parametrize("kind", TABLES)
def test_learning_rate_table(kind: str) -> None:
    made = schedule(
        "lr=1.0", "min_lr=0.1", "warmup_fraction=0.2", f"lr_schedule={kind}", "seq_len=1", "global_batch_size=1",
        "micro_batch_size=1", "train_tokens=10",
    )  # fmt: skip
    assert [made.learning_rate(step) for step in range(1, 11)] == pytest.approx(TABLES[kind], abs=1e-6)


def test_without_warmup_the_first_step_is_not_wasted() -> None:
    made = schedule("warmup_fraction=0", "lr=1.0", "min_lr=0.1", "lr_schedule=linear", "train_tokens=81920")
    assert made.num_steps == 10 and made.warmup_steps == 0
    assert made.learning_rate(1) == pytest.approx(0.91)
