"""Converting and proving the mean of several models never holds much more than one copy of the exported weights.

This file is also the program that is measured: it prints the peak of its memory, in copies of the exported weights,
beyond what it held after the export of a tiny model, which loads every library.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from zerokara.checkpoint import read_weights
from zerokara.huggingface import families, proof, to_hf
from zerokara.model import builder, parallel
from zerokara.model.shapes import ModelShape
from zerokara.samples.objective import Prompt

ROOT = Path(__file__).resolve().parents[2]
MAX_COPIES = 1.2
"""Resident, with the pages of mapped files. Loading the trained weights in fp32 would be two copies of bf16."""
TINY = ModelShape("llama", 2, 32, 4, 4, 64, 22, 500, True, 10000.0, 1e-5, 0.02)
LARGE = replace(
    TINY, num_layers=24, hidden_size=768, num_attn_heads=12, num_kv_heads=12, head_dim=64, ffn_hidden_size=2048
)


def save_weights(path: Path, shape: ModelShape) -> None:
    """A checkpoint's weights, with a spread by which every rule matters."""
    with torch.device("meta"):
        parameters = {name: parameter.shape for name, parameter in builder.build(shape).named_parameters()}
    torch.manual_seed(1)
    tensors = {name: torch.randn(size).mul_(shape.hidden_size**-0.5) for name, size in parameters.items()}
    save_file({name: tensor + name.endswith("layernorm.weight") for name, tensor in tensors.items()}, path)


def export_and_prove(folder: Path, shape: ModelShape) -> None:
    """As step 4 does, from the checkpoints in `folder`."""
    weights, hf = read_weights(*sorted(folder.glob("global_step*"))), folder / "hf"
    hf.mkdir()
    to_hf.write_model(hf, weights, shape, families.SpecialIds(1, 2, 3), "bf16", "4GB")
    texts, prompts = [Prompt([], list(range(4, 26)))], [Prompt([], [5])]
    found, _, _ = proof.prove(hf, weights, shape, "bf16", texts, prompts)
    assert not found.faults


def memory(key: str) -> int:
    """Bytes of this process by their name in /proc."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


@pytest.mark.slow
def test_an_export_needs_little_more_than_one_copy_of_the_weights(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "original_codes"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout.split()[-1]) <= MAX_COPIES, f"{done.stdout} copies"


def main(folder: Path) -> None:
    parallel.start_alone()
    for name, shape in (("tiny", TINY), ("large", LARGE)):
        first, *others = (folder / name / f"global_step{number}" for number in range(3))
        first.mkdir(parents=True)
        save_weights(first / "weights.safetensors", shape)
        for other in others:
            shutil.copytree(first, other)
    export_and_prove(folder / "tiny", TINY)
    ctypes.CDLL(None).malloc_trim(0)  # what glibc kept would serve the large model, and not be counted
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts from here
    base = memory("VmRSS")
    export_and_prove(folder / "large", LARGE)
    exported = (folder / "large/hf/model.safetensors").stat().st_size
    print((memory("VmHWM") - base) / exported)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
