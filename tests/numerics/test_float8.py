"""Runs in fp8: they learn as in bf16, whoever updates the weights, and go on from one in the other."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import Trained

SETTINGS = {"max_steps": 8, "global_batch_size": 16, "num_layers": 1}
RUNS = {
    "muon": {"optimizer": "muon", "zero_stage": 0},
    "adamw, ZeRO 3": {"optimizer": "adamw", "zero_stage": 3, "activation_checkpointing": "selective"},
}


@pytest.mark.parametrize("kind", ["muon", pytest.param("adamw, ZeRO 3", marks=[pytest.mark.slow])])
def test_a_run_in_fp8_learns_as_one_in_bf16(
    kind: str, train_runs: Callable[..., dict[str, Trained]], tmp_path: Path
) -> None:
    settings = SETTINGS | RUNS[kind]
    processes = 2 if "ZeRO" in kind else 1
    runs = train_runs(
        {name: settings | {"precision": name} for name in ("bf16", "fp8")}, processes=processes, folder=tmp_path
    )
    plain, float8 = runs["bf16"], runs["fp8"]
    assert (plain.state.precision, float8.state.precision) == ("bf16", "fp8")
    assert plain.losses[0] - plain.losses[-1] > 0.5  # something was learned
    assert plain.losses[1:] != float8.losses[1:]
    assert float8.losses == pytest.approx(plain.losses, abs=0.1 * (plain.losses[0] - plain.losses[-1]))
    further = settings | {"max_steps": 10, "lr_schedule": "constant"}
    resumed = train_runs(
        {"fp8": further | {"precision": "bf16"}, "bf16": further | {"precision": "fp8"}}, folder=tmp_path
    )
    for run in resumed.values():
        assert len(run.losses) == 10 and abs(run.losses[-1] - plain.losses[-1]) < 0.3
