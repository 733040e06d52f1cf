"""The private names of DeepSpeed that we replace are there: an upgrade that takes one away breaks nothing else."""

import importlib
import inspect

import pytest

STAGE_1_AND_2 = "runtime.zero.stage_1_and_2:"
PRIVATE = {
    "runtime.zero.muon.original_muon:muon_update": "its import costs each start three seconds of a core",
    "runtime.engine:BFLOAT16": "stage 1 in bf16 sums all gradients for all ranks, and without overlap",
    "ops:__compatible_ops__": "the first collective calls compilers, and may build an operator while the run waits",
    f"{STAGE_1_AND_2}DeepSpeedZeroOptimizer.check_overflow": "the host waits for each gradient in bf16",
    f"{STAGE_1_AND_2}mask_nan_or_inf_with_val_inplace": "the host waits for the norm of each parameter group",
}
"""Each name, and what happens without it. Those that we read or call are missed by every test of ZeRO."""


@pytest.mark.parametrize("name", PRIVATE)
def test_deepspeed_has_it(name: str) -> None:
    module, _, path = name.partition(":")
    *owners, last = path.split(".")
    found = importlib.import_module(f"deepspeed.{module}")
    for owner in owners:
        found = getattr(found, owner)
    # What an instance gets in its __init__ no class has.
    assert hasattr(found, last) or f"self.{last} =" in inspect.getsource(found), f"without it: {PRIVATE[name]}"
