"""The private names of DeepSpeed that we use are there: what an upgrade has taken away is named, with what breaks."""

import importlib
import inspect

import pytest

from zerokara.training.compute.zero import PRIVATE


@pytest.mark.parametrize("name", PRIVATE)
def test_deepspeed_has_it(name: str) -> None:
    module, _, path = name.partition(":")
    *owners, last = path.split(".")
    found = importlib.import_module(f"deepspeed.{module}")
    for owner in owners:
        found = getattr(found, owner)
    # What an instance gets in its __init__ no class has.
    assert hasattr(found, last) or f"self.{last} =" in inspect.getsource(found), f"without it: {PRIVATE[name]}"
