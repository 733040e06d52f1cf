"""A start costs no process more than training does, draws each number once, and gives the weights of seed and name."""

import gc
import hashlib
import math
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from configs import RECIPE
from drawn_models import build
from forked import answers_of, config_from
from torch.utils._python_dispatch import TorchDispatchMode

from zerokara.config.deepspeed_template import load_template
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import initial_weights, parallel
from zerokara.model.shapes import ModelShape
from zerokara.training.compute import engine_choice
from zerokara.training.compute.engine import Engine, load_state, master_weights
from zerokara.training.processes.joining import keep_freed_memory

pytestmark = pytest.mark.slow
VOCABULARY, SEED = 500, 1
PROCESSES = 4
"""Where memory is measured; two elsewhere."""
SMALL = {"num_layers": 2, "hidden_size": 64, "num_attn_heads": 4, "seq_len": 32}
LARGE = {"num_layers": 6, "hidden_size": 512, "num_attn_heads": 8, "seq_len": 32}
SLACK = 12e6
"""Bytes of what a first start loads: code, communication buffers."""
RUNS: dict[str, dict[str, Any]] = {
    "ZeRO 1, fp32": {"zero_stage": 1},
    **{f"ZeRO {stage}, bf16": {"zero_stage": stage, "precision": "bf16"} for stage in (1, 2, 3)},
    "offload, bf16": {"zero_stage": 2, "offload": "optimizer", "precision": "bf16"},
    "adafactor, bf16": {"optimizer": "adafactor", "precision": "bf16"},
    "gpt2, tensor parallel": {"architecture": "gpt2", "tensor_parallel_size": 2},
}  # fmt: skip
OF_MEMORY = {f"ZeRO {stage}, {to}, 20M": LARGE | {"zero_stage": stage, "precision": to}
             for stage, to in ((1, "bf16"), (3, "bf16"))}  # fmt: skip


def settings_of(name: str) -> dict[str, Any]:
    given = {**RUNS, **OF_MEMORY}[name]
    return {**RECIPE, **SMALL, "micro_batch_size": 1, "global_batch_size": PROCESSES, "precision": "fp32", **given}


def shape_of(name: str) -> ModelShape:
    return ModelShape.from_config(config_from(settings_of(name)), VOCABULARY)


class Draws(TorchDispatchMode):
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
    found = hashlib.sha256()
    for weights in (master_weights(engine), engine.module.named_parameters() if is_whole else ()):
        for _, weight in sorted(weights, key=itemgetter(0)):
            found.update(weight.detach().float().contiguous().numpy().tobytes())
    return found.hexdigest()


def start(config: PretrainConfig) -> dict[str, Any]:
    """Start as a run does, from nothing to an engine with its initial weights, and measure main memory.

    `peak` and `held` are resident bytes beside those before, `drawn` the numbers that this process drew, `probes` how
    often DeepSpeed asked which operators it could build, and `digest` a hash of the master weights and, where this
    process has them whole, of those that the model computes with.
    """
    from zerokara.training.compute import zero

    keep_freed_memory(False)
    template = load_template(config.deepspeed_template)
    shape = ModelShape.from_config(config, VOCABULARY)
    probe = zero.deepspeed.ops._probe_compatible_ops = mock.Mock(return_value={})
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew (proc(5))
    before = resident()
    with Draws() as draws:
        cpu = torch.device("cpu")
        engine = engine_choice.open_engine(build(shape, seed=None), config, template, cpu)
        load_state(engine, initial_weights.drawn_by_all(shape, SEED, cpu))
    found = {"peak": resident("VmHWM") - before, "held": resident() - before}
    is_cut = config.stage == 3 or config.tensor_parallel_size > 1
    digest = digest_of(engine, is_whole=not is_cut)
    return found | {"drawn": draws.count, "probes": probe.call_count, "digest": digest}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, python_path: None, warm_server: Path | None) -> dict[str, Any]:
    names = [*RUNS, *OF_MEMORY]
    jobs = {name: {"processes": PROCESSES if name in OF_MEMORY else 2, **settings_of(name)} for name in names}
    return answers_of(start, jobs, tmp_path_factory.mktemp("start"), warm_server)


@pytest.mark.parametrize("name", RUNS)
def test_the_weights_are_those_that_a_lone_process_draws(measured: dict[str, Any], name: str) -> None:
    parallel.start_alone()
    model, settings = build(shape_of(name), seed=SEED), settings_of(name)
    expected, weights = hashlib.sha256(), [weight for _, weight in sorted(model.named_parameters(), key=itemgetter(0))]
    for weight in weights:
        expected.update(weight.detach().numpy().tobytes())
    if settings.get("zero_stage") != 3 and "tensor_parallel_size" not in settings:
        in_bf16 = settings["precision"] == "bf16"
        for weight in weights:
            computing = weight.detach().bfloat16().float() if in_bf16 else weight.detach()
            expected.update(computing.numpy().tobytes())
    assert {each["digest"] for each in measured[name]} == {expected.hexdigest()}


@pytest.mark.parametrize("name", OF_MEMORY)
def test_each_number_is_drawn_once_over_all_processes(measured: dict[str, Any], name: str) -> None:
    shapes = shape_of(name).parameter_shapes()
    random = sum(math.prod(shape) for shape in shapes.values() if len(shape) > 1)
    counts = [each["drawn"] for each in measured[name]]
    assert sum(counts) == random
    assert max(counts) < 1.2 * random / PROCESSES


@pytest.mark.parametrize("name", OF_MEMORY)
def test_no_process_holds_more_than_it_trains_with_and_two_tensors(measured: dict[str, Any], name: str) -> None:
    """The gradients of a step are not there yet."""
    sizes = [math.prod(shape) for shape in shape_of(name).parameter_shapes().values()]
    gradients = 4 * sum(sizes) // (1 if "ZeRO 1" in name else PROCESSES)
    for each in measured[name]:
        assert each["peak"] < each["held"] + gradients + 2 * 4 * max(sizes) + SLACK


def test_deepspeed_probes_no_operators(measured: dict[str, Any]) -> None:
    assert {each["probes"] for processes in measured.values() for each in processes} == {0}
