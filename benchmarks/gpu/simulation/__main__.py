"""One training step on an H100 that is not there: time by part, MFU and peak memory, before a GPU is rented.

    python -m pip install --no-deps --target FOLDER triton==3.7.1        # 190 MB; for compiled layers
    python -m benchmarks.gpu.simulation 125m-muon 1.3b-muon --triton FOLDER [--set KEY=VALUE …] [--kernels 20]
    python -m benchmarks.gpu.simulation --all --triton FOLDER --write
    python -m benchmarks.gpu.simulation --compare RESULTS/measurements.jsonl

Jobs are those of `gpu.sh first` in one process without DeepSpeed (benchmarks/gpu/jobs.py), or a size. The model, the
loss, the engine of one process and the optimizer are the product's own; tensors are torch's FakeTensors, which have
shapes and storages and no numbers. So operators, kernels, bytes and memory are what they are; how fast an H100 does
them is assumed (chip.py). A job takes half a minute of a core. Needs torch's build for the CPU, and g++.

`--write` keeps the predictions of all jobs in benchmarks/gpu/predicted.json. `--compare` shows beside them what was
measured, and marks what differs by more than a quarter; `gpu.sh first` does so by itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import FIRST, RECIPE, SIZES, Job
from benchmarks.gpu.predictions import PATH, compared
from benchmarks.gpu.simulation.chip import Chip
from benchmarks.gpu.simulation.device import pretend

VOCABULARIES = {"50k": 49_500, "128k": 127_500}
"""Pieces, about, of the token files of `data.py`."""
DOCUMENT = 512
"""Length of a document of those, about."""
JOBS = {name: job for name, job in FIRST.items() if not any("offload" in each for each in job.settings)}
EAGER = ("moe", "t5")
"""Sizes whose eager layers alone can be simulated, and rightly only in their memory."""
NAMED = ("125m", "350m", "1.3b", *EAGER)
LOSS, UPDATE = "loss", "update"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"{', '.join(JOBS)}; or {', '.join(NAMED)}")
    parser.add_argument("--all", action="store_true", help="all jobs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of config.yaml")
    parser.add_argument("--triton", metavar="FOLDER", help="folder that holds the package triton, which is not run")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="show the N dearest kernels")
    parser.add_argument("--write", action="store_true", help=f"keep the predictions in {PATH.name}")
    parser.add_argument("--json", action="store_true", help="print all that is known of one job")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="what `gpu.sh first` has measured")
    given = parser.parse_args()
    if given.compare:
        lines = map(json.loads, given.compare.read_text(encoding="utf-8").splitlines())
        print("\n".join(compared({line["name"]: line for line in lines if "profile" in line})))
        return
    if given.triton:
        sys.path.append(given.triton)
    names = [*JOBS] if given.all else given.jobs
    if not names:
        parser.error(f"name a job: {', '.join([*JOBS, *NAMED])}; or --all, or --compare")
    found: dict[str, Any] = {}
    for name in names:
        if name not in JOBS and name not in NAMED:
            parser.error(f"{name}: no such job; there are {', '.join([*JOBS, *NAMED])}")
        if given.json:
            print(json.dumps(simulate(JOBS.get(name, Job(name)), given.set)))
            return
        # A process for each: the device cannot be taken back.
        others = [word for setting in given.set for word in ("--set", setting)]
        others += ["--triton", given.triton] if given.triton else []
        command = [sys.executable, "-m", "benchmarks.gpu.simulation", name, "--json", *others]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(done.returncode)
        found[name] = json.loads(done.stdout.splitlines()[-1])
        show(name, found[name], given.kernels)
    if given.write:
        kept = {
            name: {key: one[key] for key in ("step_seconds", "mfu_causal", "peak_bytes", "parts")}
            for name, one in found.items()
        }
        PATH.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def simulate(job: Job, settings: list[str]) -> dict[str, Any]:
    """Return what a step takes: seconds, by part and by kernel, MFU, and bytes at the peak."""
    pretend(Path("~/.cache/zerokara").expanduser())
    import torch

    from benchmarks.gpu.simulation.step import a_step
    from zerokara.config.loading import load
    from zerokara.config.pretrain_config import PretrainConfig
    from zerokara.model.shapes import ModelShape
    from zerokara.training.logbook import peak_flops

    chosen = ["precision=bf16", *RECIPE, *SIZES[job.size], *job.settings, *settings]
    config = load(
        PretrainConfig,
        "/dev/null",
        [f"{key}={value}" for key, value in dict(each.split("=", 1) for each in chosen).items()],
    )
    if config.compile != "off" and job.size in EAGER:
        sys.exit(f"{job.size}: only eager layers are simulated: --set compile=off")
    if config.compile != "off" and importlib.util.find_spec("triton") is None:
        sys.exit("compiled layers need triton: see --help; or --set compile=off")
    shape = ModelShape.from_config(config, VOCABULARIES[job.vocabulary])
    seen, num_micro_batches = a_step(config, shape, DOCUMENT)
    parts, kernels, roofline = Counter[str](), Counter[str](), 0.0
    for section, kernel in seen.kernels:
        times = num_micro_batches - 1 if section == "others" else num_micro_batches / 2 if section == LOSS else 1
        part = section if section in (LOSS, UPDATE) else kernel.part
        parts[part] += times * kernel.seconds
        kernels[f"{part}: {kernel.name}"] += times * kernel.seconds
        roofline += times * kernel.roofline
    seconds, tokens = parts.total(), config.global_batch * shape.input_len
    pairs = float(shape.input_len * DOCUMENT) if config.intra_document_masking else 0.0
    best = peak_flops(torch.cuda.get_device_name(0))
    assert best is not None
    return {
        "parameters": shape.num_parameters(),
        "step_seconds": seconds,
        "roofline_seconds": roofline,
        "mfu_causal": tokens * shape.flops_per_token(pairs) / (seconds * best),
        "peak_bytes": seen.peak,
        "parts": {name: 1000 * took for name, took in parts.most_common()},
        "kernels": kernels.most_common(),
        "host_waits": dict(seen.host_waits),
    }


def show(name: str, found: dict[str, Any], num_kernels: int) -> None:
    """Print what was found of a job."""
    step, roofline = 1000 * found["step_seconds"], 1000 * found["roofline_seconds"]
    peak, there = found["peak_bytes"] / 1e9, Chip.memory_bytes / 1e9
    print(f"{name}: {found['parameters'] / 1e6:.0f}M, a step of {step:.0f} ms (roofline {roofline:.0f}),")
    print(f"  MFU causal {found['mfu_causal']:.1%}, {peak:.1f} GB at the peak of {there:.0f}")
    for part, took in found["parts"].items():
        print(f"  {part:14s} {took:8.1f} ms {took / step:5.0%}")
    for kernel, seconds in found["kernels"][:num_kernels]:
        print(f"    {1000 * seconds:8.2f} ms  {kernel[:110]}")


if __name__ == "__main__":
    main()
