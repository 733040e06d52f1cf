"""The table before a run: its counts against those of what is really read."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from token_sources import consumption_of, data_plan, settings, some_lengths, write_sources

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import Fault
from zerokara.training.planning import schedule
from zerokara.training.planning.schedule import Schedule, extent_of, stage_messages, table_lines

TOTALS = (803, 4005, 330)  # 100, 500 and 41 sequences of 8
STAGES = "stages=[{tokens: 9600, source_weights: [3, 1, 0]}, {name: finish, tokens: rest, source_weights: [0, 1, 1]}]"
BATCH = ("seq_len=8", "global_batch_size=16", "micro_batch_size=4")
RECIPE = ("lr=0.001", "min_lr=0", "lr_schedule=linear", "warmup_fraction=0.02")


@pytest.fixture
def made(tmp_path: Path):  # type: ignore[no-untyped-def]
    owner = write_sources(tmp_path, some_lengths(2, TOTALS))

    def make(*overrides: str) -> tuple[PretrainConfig, dict]:
        return settings(tmp_path, 3, *BATCH, *RECIPE, *overrides), owner

    return make


def lines_of(config: PretrainConfig) -> list[str]:
    schedule = Schedule.from_config(config, *extent_of(data_plan(config)))
    return list(table_lines(data_plan(config), schedule, consumption_of(config)))


def epochs_faults(config: PretrainConfig) -> list[Fault]:
    return list(schedule.epochs_faults(config, consumption_of(config).sources))


def really_read(config: PretrainConfig, owner: dict, num_samples: int) -> list[int]:
    plan = data_plan(config)
    _, indices = plan.order().at_many(np.arange(num_samples))
    inputs = plan.tokens().many(indices)[:, :-1].ravel().tolist()
    sources = [owner[token][0] for token in inputs]
    return [sources.count(source) for source in range(3)]


@pytest.mark.parametrize(
    "overrides",
    [
        (STAGES, "train_tokens=25600"),
        (STAGES, "train_tokens=6400"),  # ends in the first stage
        (STAGES, "train_tokens=9600", "order=sequential"),
        ("source_weights=[1, 2, 3]", "train_tokens=10240"),
        ("train_tokens=2048", "order=sequential"),  # one stream: a part of a pass, and more than one
        ("train_tokens=7680", "order=sequential"),
        ("train_tokens=10272", "global_batch_size=4", "micro_batch_size=4", "seed=5"),  # whole passes
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


def examples(root: Path) -> dict[str, tuple[str, int]]:
    """The stages that the comment of config.yaml and docs/data.md show, as YAML, and the number of their sources."""
    comment = PretrainConfig.model_fields["stages"].description or ""
    (in_comment,) = re.findall(r"(\[\{.*\}\])\. Each", " ".join(comment.split()))
    page = (root / "docs" / "data.md").read_text(encoding="utf-8")
    (in_page,) = re.findall(r"^stages:.*\n((?:  - .*\n)+)", page, re.MULTILINE)
    return {"comment": (in_comment, 2), "data.md": (in_page, 3)}


@pytest.mark.parametrize("name", ["comment", "data.md"])
def test_the_examples_of_stages_can_be_used(made, root: Path, tmp_path: Path, name: str) -> None:  # type: ignore[no-untyped-def]
    stages, num_sources = examples(root)[name]
    write_sources(tmp_path, some_lengths(2, (803, 4013, 330)[:num_sources]))
    file = tmp_path / "config.yaml"
    file.write_text(f"stages: {stages}" if name == "comment" else f"stages:\n{stages}", encoding="utf-8")
    entries = [f"{letter}.jsonl" for letter in "abc"[:num_sources]]
    options = [f"input_jsonl={entries}", f"output_prefix={tmp_path}/tokens", *BATCH, *RECIPE]
    table = consumption_of(load(PretrainConfig, file, options))
    assert len(table.stages) == len(load(PretrainConfig, file, options).stages) > 1
    taken = [[use.used_tokens for use in stage] for stage in table.stages]
    assert sum(taken[0]) == 8e9 and all(any(stage) for stage in taken)


def test_a_stage_is_announced_where_it_begins_and_where_a_run_resumes_in_it(made) -> None:  # type: ignore[no-untyped-def]
    config, _ = made("stages=[{tokens: 800}, {tokens: 24}, {name: last, tokens: rest, source_weights: [1, 0, 0]}]")
    plan = data_plan(config)
    order = plan.order()  # stages begin at positions 0, 100 and 103

    def announced(positions: range, resumed: bool = False) -> list[tuple[int, str]]:
        messages = (message.split(maxsplit=5) for message in stage_messages(plan, order, positions, resumed))
        return [(int(words[1]), words[4].rstrip(":")) for words in messages]

    (first,) = stage_messages(plan, order, range(0, 16))
    assert "begins" in first and first.endswith("sources 0.156 : 0.78 : 0.064")
    assert announced(range(96, 112), resumed=True) == [(1, "continues"), (2, "begins"), (3, "begins")]
    assert announced(range(112, 128)) == []
    assert announced(range(112, 128), resumed=True) == [(3, "continues")]
    assert announced(range(103, 119), resumed=True) == [(3, "begins")]
    plan = data_plan(made("source_weights=[1, 1, 1]")[0])
    assert not list(stage_messages(plan, plan.order(), range(0, 16), resumed=True))


def test_too_many_epochs_are_refused_with_the_tables_numbers(made) -> None:  # type: ignore[no-untyped-def]
    config, _ = made(STAGES, "train_tokens=9600", "order=sequential", "max_epochs_per_source=8.5")
    (fault,) = epochs_faults(config)
    assert (fault.key, fault.value) == ("max_epochs_per_source", 8.5)
    assert all(number in fault.rule for number in ("a.jsonl", "803", "7,200", "9.00"))
    assert "6,800" in fault.remedy and "max_epochs_per_source: 9" in fault.remedy
    config, _ = made(STAGES, "train_tokens=9600", "order=sequential", "max_epochs_per_source=9")
    assert not epochs_faults(config)
    taken = [
        fault.rule.partition(" of the ")[2].split(",")[0] for fault in epochs_faults(made("train_tokens=90000")[0])
    ]
    assert taken == ["803 tokens of a.jsonl", "4", "330 tokens of c.jsonl"]
