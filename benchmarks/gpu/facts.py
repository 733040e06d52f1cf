"""What a GPU and its machine can do, without zerokara: ``python -m benchmarks.gpu.facts machine|attention [--tiny]``.

A JSON object on a line for each fact, as it is found. `machine` tells torch, what Triton needs to compile, packages,
and the ceilings: a product of matrices and a copy on the device. `attention` tells the speed of each kernel at several
sizes of heads and lengths, causal, forward and backward. What does not run tells its error in place of a number.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPEATS, WARM_UPS = 10, 3
SHAPES = ((64, 2048), (64, 8192), (128, 2048), (128, 8192), (128, 32768))
"""Size of a head and length: 32,768 tokens of hidden size 2,048 each, so that all have as many numbers."""
TINY_SHAPES = ((16, 64), (16, 128))
INSTALLED = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}
"""Kernels that torch's registry (torch.nn.attention) knows, and the package of each."""


def main() -> None:
    """Command line."""
    what, tiny = sys.argv[1], "--tiny" in sys.argv
    facts = {"machine": machine, "attention": attention}[what](tiny)
    for fact in facts:
        print(json.dumps(fact, ensure_ascii=False), flush=True)


def machine(tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield what is there, and the ceilings."""
    import torch

    on_gpu = torch.cuda.is_available()
    found: dict[str, Any] = {
        "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
    }  # fmt: skip
    if on_gpu:
        kind = torch.cuda.get_device_properties(0)
        found |= {"capability": f"{kind.major}.{kind.minor}", "multiprocessors": kind.multi_processor_count}
        found |= {"memory_bytes": kind.total_memory, "num_gpus": torch.cuda.device_count()}
        query = "nvidia-smi --query-gpu=driver_version,power.limit,clocks.max.sm --format=csv,noheader -i 0"
        found |= {"driver": printed(query), "cudnn": torch.backends.cudnn.version()}
        found |= {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    yield found
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    yield {
        "compiler": compiler and printed(f"{compiler} --version"),
        "Python.h": str(header) if header.exists() else None,
        "nvcc": shutil.which("nvcc"),
        "cores": len(os.sched_getaffinity(0)),
    }
    yield packages()
    yield from ceilings(tiny)


def packages() -> dict[str, Any]:
    """What is missing of what the measurements import, and versions that are not the locked ones."""
    from benchmarks.gpu.needs import installed, needed

    wanted, names = needed(), ("triton", "flash-attn", "flash-attn-4")
    versions = {name: installed(name) for name in [*wanted, *names]}
    return {
        "missing": [f"{name}=={version}" for name, version in wanted.items() if versions[name] is None],
        "not_as_locked": {name: versions[name] for name in wanted if versions[name] not in (None, wanted[name])},
        "installed": {name: versions[name] for name in (*names, "deepspeed", "megatron-core", "transformers")},
    }


def ceilings(tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield TFLOP/s of a product in bf16 and in fp8, and TB/s of a copy, read and written; of random numbers."""
    import torch

    size, device = (128 if tiny else 8192), a_device()
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))

    def product(multiply: Callable[[], Any]) -> dict[str, Any]:
        return rate(multiply, 2 * size**3 / 1e12, "tflops")

    yield {"product": f"{size}³ bf16", **product(lambda: left @ right)}
    left8, right8 = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    multiply = torch._scaled_mm
    yield {
        "product": f"{size}³ fp8",
        **product(lambda: multiply(left8, right8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)),
    }
    source = torch.empty(2**20 if tiny else 2**32, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    yield {"copy": f"{source.numel():,} bytes", **rate(lambda: target.copy_(source), 2 * len(source) / 1e12, "tbytes")}


def attention(tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield TFLOP/s by ``head size x length`` for each kernel, those that compile themselves last."""
    from torch.nn import attention as registry
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shapes = TINY_SHAPES if tiny else SHAPES
    kernels = {
        "cuDNN": SDPBackend.CUDNN_ATTENTION, "Flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }  # fmt: skip
    for name, kernel in kernels.items():
        yield {"attention": name, **by_shape(shapes, whole, lambda kernel=kernel: sdpa_kernel(kernel))}
    yield {"attention": "documents", **by_shape(shapes, documents, contextlib.nullcontext)}
    for name, module in INSTALLED.items():
        try:
            if importlib.util.find_spec(module) is None:
                raise ImportError(f"{module} is not installed")
            registry.activate_flash_attention_impl(name)
        except Exception as error:  # a prototype, or a torch that does not know it
            yield {"attention": name, "left_out": short(error)}
            continue
        yield {"attention": name, **by_shape(shapes, whole, lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION))}


def by_shape(shapes: Any, attend: Callable[..., Any], chosen: Callable[[], Any]) -> dict[str, Any]:
    """TFLOP/s of each shape: the four products of [S, S, E] of which half is masked, forward 2 and backward 5."""
    import torch

    tokens, width = (256, 64) if shapes is TINY_SHAPES else (32768, 2048)
    found = {}
    for head_dim, length in shapes:
        size = tokens // length, length, width // head_dim, head_dim
        heads = [torch.randn(size, device=a_device()).bfloat16().requires_grad_() for _ in range(3)]
        gradient = torch.randn(size, device=a_device()).bfloat16()

        def compute(heads: Any = heads, gradient: Any = gradient) -> None:
            with chosen():
                torch.autograd.grad(attend(*heads), heads, gradient)

        work = 7 * tokens * length * width / 1e12
        found[f"{head_dim}x{length}"] = next(iter(rate(compute, work, "tflops").values()))
    return found


def whole(query_BSHE: Any, key_BSHE: Any, value_BSHE: Any) -> Any:
    """Attention to all that stands before."""
    from torch.nn.functional import scaled_dot_product_attention

    heads = (each.transpose(1, 2) for each in (query_BSHE, key_BSHE, value_BSHE))
    return scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)


def documents(query_BSHE: Any, key_BSHE: Any, value_BSHE: Any) -> Any:
    """The same by the kernel for sequences of many lengths, each of which is one document."""
    import torch
    from torch.nn.attention.varlen import varlen_attn

    batch, length = query_BSHE.shape[:2]
    ends = torch.arange(batch + 1, dtype=torch.int32, device=query_BSHE.device) * length
    heads = (each.flatten(0, 1) for each in (query_BSHE, key_BSHE, value_BSHE))
    return varlen_attn(*heads, ends, ends, length, length, window_size=(-1, 0)).unflatten(0, (batch, length))


def rate(compute: Callable[[], Any], work: float, unit: str) -> dict[str, Any]:
    """Work a second by the median of some calls, after others that do not count; or the error."""
    import torch

    took = []
    try:
        for turn in range(WARM_UPS + REPEATS):
            started = time.perf_counter()
            if a_device() == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                compute()
                end.record()
                end.synchronize()
                took += [begin.elapsed_time(end) / 1000] if turn >= WARM_UPS else []
            else:
                compute()
                took += [time.perf_counter() - started] if turn >= WARM_UPS else []
    except Exception as error:  # it is the fact
        return {"failed": short(error)}
    return {unit: float(f"{work / statistics.median(took):.4g}")}


def a_device() -> str:
    """The GPU, or with --tiny perhaps the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def printed(command: str) -> str:
    """First line that a command prints, or why there is none."""
    try:
        done = subprocess.run(command.split(), capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return short(error)
    return next(iter((done.stdout or done.stderr).splitlines()), "")


def short(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:300]


if __name__ == "__main__":
    main()
