"""One training step of ours beside Hugging Face's on the same shape, batch and precision, in turn in one process.

``python benchmarks/train_step.py [--config config.yaml] [--set key=value …] [--rounds 5]`` prints tokens a second of
each (median over the rounds), their ratio, and the share of the matrix-product peak measured in the same run. A step is
forward, backward and AdamW's update; both use torch's fused AdamW and fp32 weights where the optimizer keeps them.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1] / "original_codes")  # not this folder: it holds a tokenize.py

# ruff: noqa: E402
import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

from zerokara import config
from zerokara.export import families
from zerokara.model import parallel
from zerokara.model.megatron import build
from zerokara.model.shapes import ModelShape
from zerokara.training import launcher
from zerokara.training.engine import Engine, init_distributed


def ours(settings: config.PretrainConfig, shape: ModelShape) -> Callable[[torch.Tensor], None]:
    """Our model under ZeRO."""
    os.environ.setdefault("LOCAL_RANK", "0")
    parallel.start_alone()
    init_distributed("cpu")
    engine = Engine(build(shape), settings, num_processes=1, template={})
    mask = torch.ones(settings.micro_batch_size, settings.seq_len)

    def step(ids: torch.Tensor) -> None:
        engine.accumulate(ids[:, :-1], ids[:, 1:], mask, float(mask.numel()))
        engine.update(1e-4)

    return step


def hugging_face(settings: config.PretrainConfig, shape: ModelShape) -> Callable[[torch.Tensor], None]:
    """The same model of transformers: bf16 weights with bf16 AdamW, as its Trainer does with `bf16_full`."""
    from transformers import AutoModelForCausalLM

    dtype = families.TORCH_DTYPES[settings.precision]
    hf_config = families.hf_config(shape, families.SpecialIds(1, 2, 3), settings.precision)
    model = AutoModelForCausalLM.from_config(hf_config).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(ids: torch.Tensor) -> None:
        model(input_ids=ids[:, :-1], labels=ids[:, 1:], shift_labels=ids[:, 1:].contiguous()).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def matrix_peak(dtype: torch.dtype) -> float:
    """Operations a second of a large square matrix product, the best of several."""
    left, right = torch.randn(2048, 2048, dtype=dtype), torch.randn(2048, 2048, dtype=dtype)
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - started)
    return 2 * 2048**3 / best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="config.yaml")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocab-size", type=int, default=8000)
    given = parser.parse_args()
    settings = config.load(config.PretrainConfig, given.config, given.set)
    settings = settings.model_copy(
        update={"global_batch_size": settings.micro_batch_size, "precision": launcher.precision(settings)}
    )
    shape = ModelShape.from_config(settings, given.vocab_size)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    steps = {"ours": ours(settings, shape), "hugging face": hugging_face(settings, shape)}
    batch_tokens = settings.micro_batch_size * settings.seq_len
    speeds: dict[str, list[float]] = {name: [] for name in steps}
    peaks = []
    for round_number in range(given.rounds + 1):
        peaks.append(matrix_peak(families.TORCH_DTYPES[settings.precision]))
        for name, step in steps.items():
            ids = torch.randint(4, given.vocab_size, (settings.micro_batch_size, settings.seq_len + 1))
            started = time.perf_counter()
            step(ids)
            if round_number:  # the first warms up
                speeds[name].append(batch_tokens / (time.perf_counter() - started))
    peak = statistics.median(peaks)
    size = f"{shape.num_parameters():,} parameters, {batch_tokens} tokens a step"
    print(f"{size}, {settings.precision}, torch {torch.__version__}")
    print(f"matrix product peak: {peak / 1e9:.0f} GFLOP/s")
    for name, measured in speeds.items():
        speed = statistics.median(measured)
        print(f"{name:>13}: {speed:8.0f} tokens/s  {speed * shape.flops_per_token() / peak:6.1%} of the peak")
    ratios = [a / b for a, b in zip(speeds["ours"], speeds["hugging face"], strict=True)]
    print(f"ratio ours / hugging face, round by round: median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
