"""Measures what a start costs: main memory and time, from nothing to an engine with its initial weights.

Reads a JSON file: a list of jobs {"processes": …, settings …}, each run in forked processes; prints a JSON list with,
for each job, what every process measured: resident bytes beside those before the start, at their `peak` and `held`
afterwards; `seconds`; `drawn`, how many numbers it drew; `probes`, how often DeepSpeed asked which operators it could
build; and `digest`, of the master weights and, but under ZeRO 3, where no process has them whole, of those that the
model computes with.
"""

import gc
import hashlib
import json
import sys
import time
import warnings
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch._inductor.compile_fx  # which torch.optim and DeepSpeed load when they are first used
from forked import answers
from torch.utils._python_dispatch import TorchDispatchMode

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import initial_weights
from zerokara.model.builder import build
from zerokara.model.shapes import ModelShape
from zerokara.training.compute import updater, zero  # noqa: F401  # DeepSpeed, once for all processes
from zerokara.training.compute.engine import Engine, load_state, master_weights
from zerokara.training.compute.updater import load_template
from zerokara.training.processes.joining import keep_freed_memory

VOCABULARY = 500
SEED = 1


class Draws(TorchDispatchMode):
    """Counts the random numbers that are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if "normal" in func.name():
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


def resident(name: str = "VmRSS") -> int:
    """Bytes of main memory that this process holds; with VmHWM the most that it has held since that was reset."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def digest_of(engine: Engine, is_whole: bool) -> str:
    """A hash of all weights, by name."""
    found = hashlib.sha256()
    for weights in (master_weights(engine), engine.module.named_parameters() if is_whole else ()):
        for _, weight in sorted(weights, key=itemgetter(0)):
            found.update(weight.detach().float().contiguous().numpy().tobytes())
    return found.hexdigest()


def start(config: PretrainConfig) -> dict[str, Any]:
    """Start as a run does."""
    warnings.simplefilter("ignore")
    keep_freed_memory(False)
    template = load_template(config.deepspeed_template)
    shape = ModelShape.from_config(config, VOCABULARY)
    probe = deepspeed.ops._probe_compatible_ops = mock.Mock(return_value={})
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew (proc(5))
    before, begun = resident(), time.monotonic()
    with Draws() as draws:
        cpu = torch.device("cpu")
        engine = updater.open_engine(build(shape, seed=None), config, template, cpu)
        load_state(engine, initial_weights.drawn_by_all(shape, SEED, cpu))
    found = {"seconds": time.monotonic() - begun, "peak": resident("VmHWM") - before, "held": resident() - before}
    digest = digest_of(engine, is_whole=config.zero_stage < 3 and config.tensor_parallel_size == 1)
    return found | {"drawn": draws.count, "probes": probe.call_count, "digest": digest}


def measure(processes: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What each process measured."""
    config = load(PretrainConfig, "/dev/null", [f"{key}={value}" for key, value in settings.items()])
    return answers(processes, config.tensor_parallel_size, lambda: start(config))


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(json.dumps([measure(job.pop("processes"), job) for job in jobs]))
