"""Weights and stages: nested values keep their lines, and every fault names the stage."""

from pathlib import Path

import pytest
from configs import faults_of, loaded

from zerokara.config.data import Stage
from zerokara.config.writing import as_yaml

GOOD = """\
input_jsonl: [a, b]
source_weights: [1, 2.5]
stages:
  - tokens: 8e9
    source_weights: [3, 0.5]
  - {source_tokens: [1000, 0], order: sequential}
  - {name: 'finish, "now]', tokens: rest, source_weights: proportional}
"""


def test_stages_are_read_and_written_again(tmp_path: Path) -> None:
    config = loaded(tmp_path, GOOD)
    assert config.source_weights == (1.0, 2.5)
    assert config.stages == (
        Stage(tokens=8_000_000_000, source_weights=(3.0, 0.5)),
        Stage(source_tokens=(1000, 0), order="sequential"),
        Stage(name='finish, "now]', tokens="rest", source_weights="proportional"),
    )
    assert [stage.num_tokens for stage in config.stages] == [8_000_000_000, 1000, None]
    written = as_yaml(config)
    assert "\nstages:\n  - {tokens: 8000000000, source_weights: [3.0, 0.5]}\n  - {source_tokens: " in written
    again = loaded(tmp_path, written)
    assert again == config and hash(again) == hash(config)


def test_stages_can_be_set_on_the_command_line(tmp_path: Path) -> None:
    config = loaded(tmp_path, "", "stages=[{tokens: 5}, {tokens: rest, order: sequential}]", "source_weights=[2]")
    assert config.stages == (Stage(tokens=5), Stage(tokens="rest", order="sequential"))
    assert config.source_weights == (2.0,)


TYPES_AND_NAMES = """\
input_jsonl: [a, b]
source_weights: [1, -2]  # source_weights
stages:
  - tokens: x  # stages[0].tokens
    source_weights: [3, y]  # stages[0].source_weights
    tokenz: 4  # stages[0].tokenz
    order: shuffle
    order: sequential  # stages[0].order
  - {name: finish, tokens: rest,
     order: sequentiall}  # stages[1].order
  - 5  # stages[2]
"""
RULES = """\
input_jsonl: [a, b]
source_weights: [1]  # source_weights
stages:
  - tokens: rest  # stages[0].tokens
    source_weights: [0, 0]  # stages[0].source_weights
  - {name: finish}  # stages[1]
  - {source_tokens: [0, 5, 6]}  # stages[2].source_tokens
  - source_tokens: [0, 5]
    tokens: 4  # stages[3].tokens
"""


@pytest.mark.parametrize("text", [TYPES_AND_NAMES, RULES], ids=["types and names", "rules"])
def test_every_fault_of_a_stage_has_its_line(tmp_path: Path, text: str) -> None:
    """Each line with a fault has its key as a comment."""
    lines = [line.partition("  # ")[2] for line in text.splitlines()]
    expected = [(f":{number}", key) for number, key in enumerate(lines, 1) if key]
    assert [(fault.where, fault.key) for fault in faults_of(tmp_path, text)] == expected


def test_a_run_cannot_be_longer_than_its_stages(tmp_path: Path) -> None:
    text = "train_tokens: 100\nstages: [{tokens: 60}, {source_tokens: [30]}]\n"
    (fault,) = faults_of(tmp_path, text)
    assert (fault.where, fault.key) == (":1", "train_tokens") and " 90 tokens" in fault.rule
    assert loaded(tmp_path, text.replace("source_tokens: [30]", "tokens: rest")).train_tokens == 100
    assert loaded(tmp_path, text, "train_tokens=90").train_tokens == 90
