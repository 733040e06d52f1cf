"""The state of a process by arithmetic is the bytes of the tensors that real training processes hold."""

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import RECIPE
from drawn_models import build
from engines import open_with_weights
from forked import answers_of, config_from

from zerokara.config.deepspeed_template import load_template
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import parallel
from zerokara.model.shapes import ModelShape
from zerokara.training.compute.engine import master_weights, optimizer_state
from zerokara.training.planning.memory import SAVE_COPY, MemoryForecast, state_bytes

pytestmark = pytest.mark.slow
VOCABULARY = 500
TOLERANCE = 0.02
"""Beside the state, a process holds a micro batch, rotary tables, and what DeepSpeed pads: in fp32, at stages 1 and 2,
the whole gradient of a parameter that the border between two ranks cuts. So no parameter here is large."""
MODEL = {"num_layers": 6, "hidden_size": 256, "num_attn_heads": 8, "seq_len": 64}
BATCH = {"global_batch_size": 4, "micro_batch_size": 1}
HIERARCHICAL = str(Path(__file__).with_name("hierarchical_template.json"))
"""Each machine keeps the weights of a step; here there is one."""
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "ZeRO 1": (2, {"zero_stage": 1}),
    "ZeRO 1, no accumulation": (2, {"zero_stage": 1, "micro_batch_size": 2}),
    "ZeRO 2": (2, {"zero_stage": 2}),
    "ZeRO 3, hierarchical": (2, {"zero_stage": 3, "deepspeed_template": HIERARCHICAL}),
    "bf16, alone": (1, {"precision": "bf16"}),
    "bf16, ZeRO 2": (2, {"zero_stage": 2, "precision": "bf16"}),
    "qwen2, bf16, ZeRO 3": (2, {"architecture": "qwen2", "zero_stage": 3, "precision": "bf16"}),
    "olmo2, tensor parallel": (2, {"architecture": "olmo2", "tensor_parallel_size": 2}),
    "adafactor, bf16, ZeRO 1": (2, {"optimizer": "adafactor", "precision": "bf16"}),
    "muon, ZeRO 3": (2, {"optimizer": "muon", "zero_stage": 3}),
}


def settings_of(name: str) -> dict[str, Any]:
    return {**RECIPE, **MODEL, **BATCH, "precision": "fp32", **RUNS[name][1]}


def tensor_bytes() -> int:
    """Bytes of all tensors that Python can reach, each storage once."""
    gc.collect()
    found: dict[int, int] = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor):
            for tensor in (one, one.grad if one.is_leaf else None):
                if tensor is not None:
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def settled_bytes() -> int:
    """The lesser of two looks: a thread of gloo's lets go of a finished sum's tensor when it gets to it."""
    first = tensor_bytes()
    time.sleep(0.04)
    return min(first, tensor_bytes())


def train(config: PretrainConfig) -> dict[str, int]:
    """Train for two steps on random ids and measure in the second."""
    before = tensor_bytes()
    model = build(ModelShape.from_config(config, VOCABULARY), seed=1)
    first_layer = next(iter(model.all_layers()))
    template = load_template(config.deepspeed_template)
    engine = open_with_weights(model, config, template, torch.device("cpu"))
    del model
    within, between = [0], [0]
    step = 1

    def at_end_of_backward(module: torch.nn.Module, args: tuple[Any, ...], others: dict[str, Any]) -> None:
        hidden = next(one for one in (*args, *others.values()) if isinstance(one, torch.Tensor) and one.requires_grad)
        if step == 2:
            hidden.register_hook(lambda gradient: within.append(tensor_bytes() - before))

    first_layer.register_forward_pre_hook(at_end_of_backward, with_kwargs=True)
    generator = torch.Generator().manual_seed(parallel.data_rank())
    for step in (1, 2):
        for _ in range(config.global_batch_size // config.micro_batch // parallel.data_size()):
            inputs, labels = (
                torch.randint(4, VOCABULARY, (config.micro_batch, length), generator=generator)
                for length in (config.lengths.input, config.lengths.target)
            )
            engine.accumulate([inputs, labels, torch.ones(labels.shape)], float(labels.numel()), len(labels))
            if step == 2:
                between.append(settled_bytes() - before)
        engine.update(1e-3)
    saved = sum(4 * tensor.numel() for part in (master_weights(engine), optimizer_state(engine)) for _, tensor in part)
    return {"within": max(within), "between": max(between), "saved": saved}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, python_path: None, warm_server: Path | None) -> dict[str, Any]:
    jobs = {name: {"processes": processes, **settings_of(name)} for name, (processes, _) in RUNS.items()}
    found = answers_of(train, jobs, tmp_path_factory.mktemp("memory"), warm_server)
    return {name: {key: max(one[key] for one in ranks) for key in ranks[0]} for name, ranks in found.items()}


@pytest.mark.parametrize("name", RUNS)
def test_the_state_is_the_bytes_of_the_tensors(measured: dict[str, dict[str, int]], name: str) -> None:
    loaded = config_from(settings_of(name))
    template = load_template(loaded.deepspeed_template)
    shape = ModelShape.from_config(loaded, VOCABULARY)
    # As on a GPU: on a CPU a buffer that is not written to is a tensor, and takes no memory.
    run = MemoryForecast(loaded, shape, RUNS[name][0], nodes=1, template=template, main_bytes=0, gpu_bytes=0)
    parts, found = state_bytes(run), measured[name]
    copy = parts.pop(SAVE_COPY)
    # With little in it beside the state: a bucket is there while a backward pass runs.
    assert sum(parts.values()) == pytest.approx(max(found["within"], found["between"]), rel=TOLERANCE)
    assert copy == -(-found["saved"] // RUNS[name][0])
