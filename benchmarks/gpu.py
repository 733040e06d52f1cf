"""One size of model on one GPU: speed, memory, and which kernels ran. `benchmarks/gpu.sh` calls it for each part.

    python benchmarks/gpu.py 125m|350m|1.3b [--tiny] [--steps 30] [--set key=value …] --results DIR

The loop, the engine and the compiled layers are those of step 3, at a sequence of 2,048 in bf16, on random tokens (what
the tokens are changes no time). It finds out: tokens a second and MFU (median of the steps after the first three), peak
memory beside the state's by arithmetic, seconds to the first step, the kernels of attention (by torch.profiler), and
whether DeepSpeed built an operator meanwhile. Writes <size>.json into the results; `--table` prints all of them.
`--tiny` tries it all on a small model, on a CPU too, and writes nothing under benchmarks/results.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT / "original_codes")  # not this folder: it holds a tokenize.py

# ruff: noqa: E402
import argparse
import importlib.metadata
import json
import os
import statistics
import time
from typing import Any

import numpy as np
import psutil
import torch
from torch.profiler import ProfilerActivity, profile

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import compilation, parallel
from zerokara.model.builder import build
from zerokara.model.shapes import ModelShape
from zerokara.progress import bytes_text, count_text
from zerokara.samples.objective import Causal
from zerokara.training.batch_loader import to_device
from zerokara.training.compute import devices, updater
from zerokara.training.compute.deepspeed_settings import load_template
from zerokara.training.compute.engine import Engine
from zerokara.training.planning.memory import Device, TrainingLayout, state_parts
from zerokara.training.planning.run_plan import template_path
from zerokara.training.processes import launcher
from zerokara.training.processes.joining import init_process_group

VOCAB_SIZE = 50_000
SIZES = {
    "125m": ("num_layers=12", "hidden_size=768", "num_attn_heads=12", "ffn_hidden_size=2048", "micro_batch_size=32"),
    "350m": ("num_layers=24", "hidden_size=1024", "num_attn_heads=16", "ffn_hidden_size=2816", "micro_batch_size=16"),
    "1.3b": ("num_layers=24", "hidden_size=2048", "num_attn_heads=16", "ffn_hidden_size=5504", "micro_batch_size=8"),
}
TINY = ("num_layers=2", "hidden_size=64", "num_attn_heads=4", "ffn_hidden_size=128", "micro_batch_size=2", "seq_len=64")
ACCUMULATED = 4
"""Micro batches in a step."""
WARM_UP_STEPS = 3


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=list(SIZES), nargs="?")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of config.yaml")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print what lies in the results, and measure nothing")
    given = parser.parse_args()
    if given.table:
        print(table(given.results))
        return
    if not torch.cuda.is_available() and not given.tiny:
        sys.exit("no GPU that torch can use; --tiny tries the program on a CPU")
    found = measure(given)
    given.results.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=2, ensure_ascii=False)
    (given.results / f"{given.size}.json").write_text(text + "\n", encoding="utf-8")


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Train for some steps and look."""
    device = devices.local_device()
    shape_settings = [*SIZES[given.size], "seq_len=2048", "precision=bf16"]
    if given.tiny:
        shape_settings = [*TINY, "precision=bf16" if device.type == "cuda" else "precision=fp32"]
    settings = load(PretrainConfig, "/dev/null", ["global_batch_size=32", *shape_settings, *given.set])
    settings = settings.model_copy(update={"global_batch_size": ACCUMULATED * settings.micro_batch})
    shape = ModelShape.from_config(settings, 1000 if given.tiny else VOCAB_SIZE)
    template = load_template(template_path(settings.deepspeed_template))
    built_before = built_operators()
    engine, compiled = start(settings, shape, template, device)
    seconds: list[float] = []
    first_step = 0.0
    for number in range(WARM_UP_STEPS + (2 if given.tiny else given.steps)):
        started = time.perf_counter()
        step(engine, settings, shape, device, number)
        seconds.append(time.perf_counter() - started)
        first_step = first_step or time.time() - psutil.Process().create_time()
    memory = devices.peak_memory(device)
    kernels = attention_kernels(engine, settings, shape, device)
    speed = settings.global_batch_size * settings.seq_len / statistics.median(seconds[WARM_UP_STEPS:])
    peak = devices.peak_flops(device)
    kind: Device = "cuda" if device.type == "cuda" else "cpu"
    layout = TrainingLayout.from_config(settings, shape, 1, kind, template)
    return {
        "size": given.size,
        "command": " ".join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(device) if kind == "cuda" else "cpu",
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "megatron-core")},
        "parameters": shape.num_parameters(),
        "batch": f"{ACCUMULATED} × {settings.micro_batch} × {settings.seq_len}",
        "precision": settings.precision,
        "zero_stage": settings.zero_stage,
        "compiled": compiled,
        "tokens_per_second": speed,
        "mfu": speed * shape.flops_per_token() / peak if peak else None,
        "memory_bytes": memory,
        "state_bytes": sum(part.num_bytes for part in state_parts(layout) if not part.once),
        "first_step_seconds": first_step,
        "attention_kernels": kernels,
        "flash": any("flash" in name.lower() for name in kernels),
        "operators_built_by_deepspeed": sorted(built_operators() - built_before),
    }


def start(
    settings: PretrainConfig, shape: ModelShape, template: dict[str, Any], device: torch.device
) -> tuple[Engine, bool]:
    """The engine as a training process has it, alone; and whether its layers are compiled."""
    os.environ.update(launcher.lone_environment())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    init_process_group(device)
    parallel.start(settings.seed)
    model = build(shape, seed=settings.seed)
    chosen = updater.choose(settings.zero_stage, settings.optimizer, settings.offload, data_parallel_size=1)
    engine = updater.open_engine(model, settings, chosen, 1, template)
    if compilation.reason_against(settings.compile, device.type, settings.zero_stage):
        return engine, False
    return engine, compilation.start(model, settings.micro_batch, intra_document_masking=False, log=print)


def step(engine: Engine, settings: PretrainConfig, shape: ModelShape, device: torch.device, number: int) -> None:
    """One update, from arrays of ids to the norm of the gradient (which waits for the device)."""
    chance = np.random.default_rng(number)
    make_batch = Causal(settings.lengths)
    global_tokens = float(settings.global_batch_size * settings.seq_len)
    for index in range(settings.global_batch_size // settings.micro_batch):
        if index:
            engine.finish_micro_batch()
        ids = chance.integers(4, shape.vocab_size, (settings.micro_batch, settings.seq_len + 1))
        engine.accumulate(to_device(make_batch(ids, np.arange(len(ids))), device), global_tokens)
    norm = engine.update(1e-4)
    assert np.isfinite(norm), norm


def attention_kernels(engine: Engine, settings: PretrainConfig, shape: ModelShape, device: torch.device) -> list[str]:
    """Names of what computed the attention in one step: on a GPU kernels, on a CPU torch's operators."""
    kinds = [ProfilerActivity.CUDA, ProfilerActivity.CPU] if device.type == "cuda" else [ProfilerActivity.CPU]
    with profile(activities=kinds, acc_events=True) as seen:
        step(engine, settings, shape, device, WARM_UP_STEPS)
    words = ("flash", "attention", "fmha")
    names = {event.key for event in seen.key_averages() if any(word in event.key.lower() for word in words)}
    return sorted(name[:120] for name in names)


def built_operators() -> set[str]:
    """What lies in the folder into which DeepSpeed builds operators (torch/utils/cpp_extension.py)."""
    cache = os.environ.get("TORCH_EXTENSIONS_DIR") or Path(
        os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "torch_extensions"
    )
    return {str(path.relative_to(cache)) for path in Path(cache).rglob("*.so")}


def table(results: Path) -> str:
    """All sizes that were measured, as Markdown."""
    found = [
        json.loads((results / f"{size}.json").read_text()) for size in SIZES if (results / f"{size}.json").exists()
    ]
    if not found:
        return f"nothing was measured in {results}"
    first = found[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    lines = [
        f"{first['device']}, {versions}",
        "",
        "| size | weights | batch | compiled | tokens/s | MFU | peak memory | state | first step | flash | built |",
        "|---|---:|---|---|---:|---:|---:|---:|---:|---|---|",
    ]
    for one in found:
        mfu = "n/a" if one["mfu"] is None else f"{one['mfu']:.1%}"
        lines.append(
            f"| {one['size']} | {count_text(one['parameters'])} | {one['batch']} {one['precision']} | "
            f"{'yes' if one['compiled'] else 'no'} | {one['tokens_per_second']:,.0f} | {mfu} | "
            f"{bytes_text(one['memory_bytes'])} | {bytes_text(one['state_bytes'])} | "
            f"{one['first_step_seconds']:.0f} s | {'yes' if one['flash'] else 'NO'} | "
            f"{', '.join(one['operators_built_by_deepspeed']) or 'nothing'} |"
        )
    lines += ["", *(f"- `{one['command']}`" for one in found)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
