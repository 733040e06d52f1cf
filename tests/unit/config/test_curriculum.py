"""Weights and stages: nested values keep their lines, and every fault names the stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerokara.config import PretrainConfig, as_yaml, help_text, load
from zerokara.config.curriculum import Stage, declared_tokens
from zerokara.errors import UserError

GOOD = """\
input_jsonl: [a, b]
source_weights: [1, 2.5]
stages:
  - tokens: 8e9
    source_weights: [3, 0.5]
  - {source_tokens: [1000, 0], order: sequential}
  - {name: 'finish, "now]', tokens: rest, source_weights: proportional}
"""


def loaded(tmp_path: Path, text: str, *overrides: str) -> PretrainConfig:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return load(PretrainConfig, path, overrides)


def faults_of(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        loaded(tmp_path, text, *overrides)
    return [str(fault).replace(str(tmp_path) + "/", "") for fault in caught.value.faults]


def test_stages_are_read_and_written_again(tmp_path: Path) -> None:
    config = loaded(tmp_path, GOOD)
    assert config.source_weights == (1.0, 2.5)
    assert config.stages == (
        Stage(tokens=8_000_000_000, source_weights=(3.0, 0.5)),
        Stage(source_tokens=(1000, 0), order="sequential"),
        Stage(name='finish, "now]', tokens="rest", source_weights="proportional"),
    )
    assert declared_tokens(config.stages) is None and declared_tokens(config.stages[:2]) == 8_000_001_000
    written = as_yaml(config)
    assert "\nstages:\n  - {tokens: 8000000000, source_weights: [3.0, 0.5]}\n  - {source_tokens: " in written
    again = loaded(tmp_path, written)
    assert again == config and hash(again) == hash(config)
    assert str(config.stages[1]) == "source_tokens=(1000, 0) order='sequential'"


def test_the_default_is_told_and_on_the_command_line_too(tmp_path: Path) -> None:
    assert "\nstages: []\n" in as_yaml(loaded(tmp_path, ""))
    assert "  stages: []\n" in help_text(PretrainConfig)
    config = loaded(tmp_path, "", "stages=[{tokens: 5}, {tokens: rest, order: sequential}]", "source_weights=[2]")
    assert config.stages == (Stage(tokens=5), Stage(tokens="rest", order="sequential"))
    assert config.source_weights == (2.0,)


def test_wrong_types_and_names_inside_a_stage_are_told_with_their_lines(tmp_path: Path) -> None:
    text = """\
input_jsonl: [a, b]
source_weights: [1, -2]
stages:
  - tokens: x
    source_weights: [3, y]
    tokenz: 4
    order: shuffle
    order: sequential
  - {name: finish, tokens: rest,
     order: sequentiall}
  - 5
"""
    assert faults_of(tmp_path, text) == [
        "config.yaml:2: source_weights = [1, -2]: must be 'proportional' or a list in which each is at least 0",
        "config.yaml:4: stages[0].tokens = x: must be a whole number or 'rest'; write a number without quotes or units",
        "config.yaml:5: stages[0].source_weights = [3, 'y']: must be 'proportional' or a list in which each is a "
        "number",
        "config.yaml:6: stages[0].tokenz = 4: there is no such setting; did you mean tokens?",
        "config.yaml:8: stages[0].order: stands twice, first at line 7; keep one",
        "config.yaml:10: stages[1].order = sequentiall: must be 'shuffle' or 'sequential'",
        "config.yaml:11: stages[2] = 5: must be a mapping (name: value, …)",
    ]


def test_rules_within_and_between_stages(tmp_path: Path) -> None:
    text = """\
input_jsonl: [a, b]
source_weights: [1]
stages:
  - tokens: rest
    source_weights: [0, 0]
  - {name: finish}
  - {source_tokens: [0, 5, 6]}
  - source_tokens: [0, 5]
    tokens: 4
"""
    assert faults_of(tmp_path, text) == [
        "config.yaml:2: source_weights = [1.0]: must have one number for each of the 2 entries of input_jsonl: a, b",
        "config.yaml:4: stages[0].tokens = rest: must be a number in every stage but the last",
        "config.yaml:5: stages[0].source_weights = [0.0, 0.0]: must have a number above 0",
        "config.yaml:6: stages[1] = {'name': 'finish'}: does not say how long it is; give it tokens, or source_tokens",
        "config.yaml:7: stages[2].source_tokens = [0, 5, 6]: must have one number for each of the 2 entries of "
        "input_jsonl: a, b",
        "config.yaml:9: stages[3].tokens = 4: stands beside source_tokens, which says it; keep one",
    ]


def test_a_run_cannot_be_longer_than_its_stages(tmp_path: Path) -> None:
    text = "train_tokens: 100\nstages: [{tokens: 60}, {tokens: 30}]\n"
    assert faults_of(tmp_path, text) == [
        "config.yaml:1: train_tokens = 100: is more than the stages have: 90 tokens together; set it to auto, or let a "
        "last stage have `tokens: rest`"
    ]
    assert loaded(tmp_path, text.replace("30}", "rest}")).train_tokens == 100
    assert loaded(tmp_path, text, "train_tokens=90").train_tokens == 90


def test_faults_from_the_command_line_name_it(tmp_path: Path) -> None:
    assert faults_of(tmp_path, "", "stages=[{sauce_tokens: 5}]") == [
        "--set: stages[0].sauce_tokens = 5: there is no such setting; did you mean source_tokens?"
    ]
