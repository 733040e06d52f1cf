"""megatron-core is imported without torch's compiler and wandb, and both work afterwards as before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, torch
compile_before = torch.compile
import zerokara.model.builder
assert torch.compile is compile_before, "torch.compile is another"
loaded = [name for name in ("torch._inductor.compile_fx", "torch._dynamo", "wandb") if name in sys.modules]
assert not loaded, loaded
import wandb
assert wandb.init and torch.compile(lambda x: x + 1, backend="eager")(torch.ones(())) == 2
"""


def test_unused_packages_are_not_loaded() -> None:
    path = str(Path(__file__).resolve().parents[3] / "original_codes")
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
