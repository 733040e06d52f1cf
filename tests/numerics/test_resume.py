"""An interrupted and resumed run equals an uninterrupted one; bit for bit in one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rounding
from configs import typed
from tiny import assert_same_bits
from token_sources import consumption_of

from zerokara import checkpoint
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.steps import tokenize
from zerokara.training.monitoring import step_metrics

STAGES = (
    "[{tokens: 1664, source_weights: [3, 1]}, {tokens: 3968, source_weights: [1, 5]}, "
    "{tokens: rest, source_weights: [1, 0]}]"
)
"""52 and 124 sequences of 32: the first ends within step 7, the second with step 22."""


def tokenized(tiny_data: dict[str, str], folder: Path, sources: dict[str, slice], **more: str) -> dict[str, Any]:
    """Make token files of parts of the tiny corpus, each a source, and give the settings that name them."""
    lines = Path(tiny_data["input_jsonl"]).read_text(encoding="utf-8").splitlines(keepends=True)
    for name, part in sources.items():
        (folder / f"{name}.jsonl").write_text("".join(lines[part]), encoding="utf-8")
    names = ", ".join(f"{folder}/{name}.jsonl" for name in sources)
    settings = {"input_jsonl": f"[{names}]", "output_prefix": str(folder / "tokens"), **more}
    assert tokenize.main(["--config", tiny_data["config"], *typed(**settings)]) == 0
    return settings


KINDS: dict[str, dict] = {
    "fp32": {"precision": "fp32", "eval_interval": 4, "keep_last": 20},
    "bf16": {"precision": "bf16"},
    "curriculum": {"stages": STAGES, "dropout": 0.1},
    "adafactor_bf16": {"optimizer": "adafactor", "precision": "bf16"},
    "muon_bf16": {"optimizer": "muon", "precision": "bf16", "dropout": 0.1},
    "offload_bf16_stage2": {"offload": "optimizer", "precision": "bf16", "zero_stage": 2},
    "offload_all_bf16_stage3": {"offload": "all", "precision": "bf16", "zero_stage": 3},
}
"""What is told apart: who updates the weights, and what is kept where."""
STEPS, STOPS = 14, (4, 12)
"""The second stop, before step 12, is in another epoch than the first."""
CURRICULUM_STEPS, CURRICULUM_STOPS = 30, (4, 23)
"""The same for the stages of `STAGES`."""
SMALLER = {name: {"micro_batch_size": 8, "num_layers": 1} for name in KINDS if name.startswith(("a", "m", "o"))}


@pytest.fixture(scope="module")
def runs(train_runs: Callable, tiny_data: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder, few, sources = (tmp_path_factory.mktemp(name) for name in ("resume", "few", "sources"))
    trained, again = {}, {}
    # So little of the corpus that a run reads all of it and begins again; and two sources, the first read repeatedly.
    plain = tokenized(tiny_data, few, {"a": slice(12)}, valid_min_documents="4")
    plain |= {"train_tokens": STEPS * 8 * 32}
    staged = tokenized(tiny_data, sources, {"a": slice(15), "b": slice(15, None)}, valid_min_documents="4")
    staged |= {"train_tokens": CURRICULUM_STEPS * 8 * 32}
    for name, kind in KINDS.items():
        common = {**(staged if "stages" in kind else plain), **SMALLER.get(name, {}), **kind}
        first, second = CURRICULUM_STOPS if "stages" in kind else STOPS
        trained[f"{name}_unbroken"] = common
        trained[f"{name}_broken"] = {**common, "stop_at": first}
        again[f"{name}_broken"] = {**common, "stop_at": second}
    done = train_runs(trained, folder=folder)
    train_runs(again, folder=folder)
    train_runs({name: {k: v for k, v in s.items() if k != "stop_at"} for name, s in again.items()}, folder=folder)
    return done


@pytest.mark.parametrize("name", KINDS)
def test_resumed_twice_equals_unbroken_bit_for_bit(runs: dict, name: str) -> None:
    unbroken, broken = runs[f"{name}_unbroken"], runs[f"{name}_broken"]
    assert len(unbroken.losses) == (CURRICULUM_STEPS if "stages" in KINDS[name] else STEPS)
    assert_same_bits(broken, unbroken)


def test_a_validation_that_a_stop_put_off_is_in_its_checkpoint(runs: dict) -> None:
    """Else the best one may be deleted, whose number nobody knows."""
    state = checkpoint.read_state(checkpoint.folder_of(runs["fp32_broken"].folder, STOPS[0]))
    assert state.facts["valid_step"] == STOPS[0] and "selection_loss" in state.facts


def test_every_step_is_recorded_once(runs: dict) -> None:
    lines = [line for line in step_metrics.read(Path(runs["bf16_broken"].folder)) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    first, second = (lines[stop - 2]["epoch"] for stop in STOPS)  # of the last step before each stop
    assert first < 1 < second, "no run was stopped in its second epoch"


def test_what_a_curriculum_read_is_what_its_table_says(runs: dict) -> None:
    folder = runs["curriculum_broken"].folder
    table = consumption_of(load(PretrainConfig, folder / "config_resolved.yaml"))
    read = [line["source_tokens"] for line in step_metrics.read(folder) if "loss" in line]
    assert read[-1] == [use.used_tokens for use in table.sources]
    assert sum(read[0]) == 8 * 32 and read == sorted(read)
    in_first_stage, in_second = (
        [sum(stage[source].used_tokens for stage in table.stages[:number]) for source in (0, 1)] for number in (1, 2)
    )
    assert in_first_stage == [39 * 32, 13 * 32] and read[21] == in_second
    assert table.sources[0].epochs > 1  # so the run crosses the edge of an epoch of that source


ODD = {"architecture": "gpt2", "num_kv_heads": "auto", "hidden_size": 15, "num_attn_heads": 1}
"""No norm of width 15 is cut into two equal pieces."""

ADAFACTOR = {"optimizer": "adafactor", "lr": 0.1, "min_lr": 0.01}
"""Its learning rate is a share of the weights, which are small at first."""


@pytest.fixture(scope="module")
def moved(train_runs: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Runs that were stopped in one process, and went on otherwise in two."""
    folder = tmp_path_factory.mktemp("moved")
    short = {"train_tokens": 12 * 8 * 32}
    before = {
        "adamw": {"micro_batch_size": 4},
        "adafactor": {**ADAFACTOR, "micro_batch_size": 8},
        "muon": {"optimizer": "muon", "micro_batch_size": 4},
        "odd": {"zero_stage": 3, **ODD},
        "changed": {"zero_stage": 1},
    }
    changes = {
        "adamw": {"zero_stage": 3},
        "adafactor": {"zero_stage": 2, "micro_batch_size": 2},
        "muon": {"zero_stage": 3, "micro_batch_size": 2},
        "changed": {"optimizer": "muon"},
    }
    before = {name: settings | short for name, settings in before.items()}
    after = {name: settings | changes.get(name, {}) for name, settings in before.items()}
    stopped = {name: {**settings, "stop_at": 6} for name, settings in before.items()}
    alone = train_runs(
        {**stopped, **{f"{name}_unbroken": settings for name, settings in before.items()}}, folder=folder
    )
    # Sharded, which a lone process is not.
    shared = {**short, "precision": "bf16", "zero_stage": 1, "micro_batch_size": 4}
    after |= {
        "shared_unbroken": shared,
        "shared_broken": {**shared, "stop_at": 4},
        "shared_resumed": {**shared, "output_model_dir": str(folder / "shared_broken")},
    }
    return {**alone, **train_runs(after, processes=2, folder=folder)}


@pytest.mark.slow
def test_two_processes_resume_bit_for_bit(moved: dict) -> None:
    assert len(moved["shared_unbroken"].losses) == 12
    assert_same_bits(moved["shared_broken"], moved["shared_unbroken"])


@pytest.mark.parametrize("name", ["adamw", "odd", "adafactor", "muon"])
def test_another_number_of_processes_stage_and_micro_batch_goes_on(moved: dict, name: str) -> None:
    expected = moved[f"{name}_unbroken"].losses
    assert len(expected) == 12 and expected[-1] < expected[0] - 0.1, "nothing was learned: equality would mean nothing"
    rounding.assert_same_curve(moved[name].losses, expected)


def test_another_optimizer_starts_anew(moved: dict) -> None:
    losses, unbroken = moved["changed"].losses, moved["changed_unbroken"].losses
    assert losses[:6] == unbroken[:6]
    assert rounding.times_tolerance(losses, unbroken) > rounding.BROKEN
    state = moved["changed"].state
    assert (state.optimizer, state.step, state.updates) == ("muon", 12, 6)
    keys = {name.rpartition(".")[2] for name in moved["changed"].moments}
    assert keys == {"exp_avg", "exp_avg_sq", "momentum_buffer"}
