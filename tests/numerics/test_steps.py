"""What a training step asks of its device, and what it sends; watched in steps of every kind."""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import flash
import pytest
import torch
import torch.distributed
from configs import RECIPE
from drawn_models import build
from engines import open_with_weights
from forked import answers_of
from grouped import plain_grouped_mm
from steps import KINDS, VOCABULARY, stepper
from torch.utils._python_dispatch import TorchDispatchMode

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import attention, builder, experts, layout, parallel
from zerokara.model.shapes import ModelShape
from zerokara.training.compute import buckets
from zerokara.training.compute.updater import load_template
from zerokara.training.processes.joining import Processes

MODEL = {"num_layers": 2, "hidden_size": 64, "num_attn_heads": 4, "seq_len": 32}
BATCH = {"global_batch_size": 8, "micro_batch_size": 2}
"""Gradient accumulation, with two processes too."""
RUNS: dict[str, dict[str, Any]] = {
    **KINDS,
    **{f"{name}, bf16": {**KINDS[name], "precision": "bf16"}
       for name in KINDS if "ZeRO" in name or name.startswith("masking")},
    "tensor parallel": {"tensor_parallel_size": 2},
    "tensor parallel, ZeRO 1": {"tensor_parallel_size": 2, "zero_stage": 1},
}  # fmt: skip
WAITING = ("_local_scalar_dense", "nonzero", "bincount", "equal", "unique", "_unique2", "masked_select")
"""Operations whose result the host needs: on a GPU it waits until the device has done all that it was given."""


class Watch(TorchDispatchMode):
    """Counts what passes torch's dispatcher.

    A tensor that is made from the host's own numbers, or only from such tensors, is the host's: reading it waits for
    nobody. All others stand for those of a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.order: list[str] = []
        """Collectives by name, and gradients as they are done."""
        self._hosts: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        tensors = tensors_in((args, kwargs or {}))
        if func.namespace == "c10d":
            self.order.append(name.rstrip("_"))
            for dtype in {each.dtype for each in tensors}:
                size = sum(each.numel() * each.element_size() for each in tensors if each.dtype == dtype)
                self.moved[f"{name.rstrip('_')} {str(dtype).removeprefix('torch.')}"] += size
        elif tensors and all(self.is_hosts(each) for each in tensors):
            pass
        elif name in WAITING:
            self.waits[name] += 1
        elif name in ("index", "index_put_") and any(one is not None and one.dtype == torch.bool for one in args[1]):
            self.waits["index by a mask"] += 1
        made = func(*args, **(kwargs or {}))
        if name == "lift_fresh" or (tensors and all(self.is_hosts(each) for each in tensors)):
            for each in tensors_in(made):
                self.add_hosts(each)
        return made

    def add_hosts(self, tensor: torch.Tensor) -> None:
        """Remember it: as long as it lives, no other has its memory."""
        self._hosts[tensor.untyped_storage().data_ptr()] = tensor

    def is_hosts(self, tensor: torch.Tensor) -> bool:
        """Whether it is the host's."""
        return tensor.untyped_storage().data_ptr() in self._hosts


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """All tensors of a nested structure."""
    return [each for each in torch.utils._pytree.tree_leaves(tree) if isinstance(each, torch.Tensor)]


def watch(config: PretrainConfig) -> dict[str, Any]:
    """Train two steps on random ids and watch the second, its edge included.

    `waits` are the operations that would make a GPU's host wait, by name; `moved` the bytes that collectives carry, by
    name and number format.
    """
    # As on a GPU: the kernel for experts, and in bf16 that for documents.
    experts.has_kernel, experts.grouped_mm = lambda hidden: True, plain_grouped_mm
    attention.has_variable_length_kernel = lambda weight, head_dim: weight.dtype == torch.bfloat16
    layout.is_batch_first = lambda _: True
    flash.install()
    buckets.BUCKET = 2**14
    model = build(ModelShape.from_config(config, VOCABULARY), seed=1, routing=config)
    template = load_template(config.deepspeed_template)
    engine = open_with_weights(model, config, template, torch.device("cpu"))
    processes = Processes(torch.device("cpu"), torch.distributed.get_rank())
    step = stepper(config, engine, processes, seed=parallel.data_rank())
    seen, to_list = Watch(), torch.Tensor.tolist

    # A list is read from a CPU's memory without the dispatcher; on a GPU it waits.
    def counted(tensor: torch.Tensor) -> Any:
        seen.waits["tolist"] += not seen.is_hosts(tensor)
        return to_list(tensor)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.order.append("gradient"))
    step(1)
    with seen, mock.patch.object(torch.Tensor, "tolist", counted):
        step(2)
    in_layers = sum(weight.numel() for name, weight in model.named_parameters() if ".layers." in name)
    counts = {"parameters": builder.num_parameters(model), "in_layers": in_layers}
    return {"waits": seen.waits, "moved": seen.moved, "order": seen.order, **counts}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, python_path: None, warm_server: Path | None) -> dict[str, Any]:
    common = {**RECIPE, **MODEL, **BATCH, "precision": "fp32"}
    jobs = {name: {**common, **settings} for name, settings in RUNS.items()}
    return answers_of(watch, jobs, tmp_path_factory.mktemp("steps"), warm_server)


@pytest.mark.parametrize("name", RUNS)
def test_the_host_waits_for_the_device_once_a_step(seen: dict[str, Any], name: str) -> None:
    assert max(sum(rank["waits"].values()) for rank in seen[name]) == 1, seen[name]


@pytest.mark.parametrize("name", RUNS)
def test_gradients_are_summed_in_fp32_and_weights_move_as_they_compute(seen: dict[str, Any], name: str) -> None:
    settings = {"zero_stage": 1, "precision": "fp32", "tensor_parallel_size": 1, **RUNS[name]}
    moved = seen[name][0]["moved"]
    kinds = {(operation, dtype) for operation, dtype in (kind.split() for kind in moved)}
    sums = {"allreduce", "reduce", "reduce_scatter", "_reduce_scatter_base"}
    # Beside gradients: the numbers of a step in fp64.
    assert {dtype for operation, dtype in kinds if operation in sums} <= {"float32", "float64"}
    of_weights = {dtype for operation, dtype in kinds if operation not in sums}
    assert of_weights <= {"bfloat16" if settings["precision"] == "bf16" else "float32"}
    if settings["tensor_parallel_size"] == 1:
        gradients = max(size for kind, size in moved.items() if kind.split()[0] in sums)
        assert gradients > 4 * 100_000, "each parameter's, four bytes"
        assert bool(of_weights) is (settings["zero_stage"] > 0)


@pytest.mark.parametrize("name", ["ZeRO 1", "ZeRO 2", "ZeRO 3", "ZeRO 2, bf16", "ZeRO 3, bf16"])
def test_sharded_gradients_are_scattered_and_weights_gathered(seen: dict[str, Any], name: str) -> None:
    """No rank gets a whole sum. Gradients move once a step at stage 1, else in both micro batches; so do weights at
    stage 3, and those of layers for each backward pass again."""
    stage, width = int(name[5]), 2 if "bf16" in name else 4
    for rank in seen[name]:
        moved, count, in_layers = rank["moved"], rank["parameters"], rank["in_layers"]
        assert not {"allreduce float32", "reduce float32"} & {kind for kind, size in moved.items() if size > 4}
        # Counted are what a rank gives and what it gets, of which one is its half.
        gathered = sum(size for kind, size in moved.items() if kind.startswith("_allgather_base")) / 1.5 / width
        assert gathered == pytest.approx(2 * (count + in_layers) if stage == 3 else count, rel=0.01)
        assert moved["_reduce_scatter_base float32"] / 1.5 / 4 == pytest.approx(min(stage, 2) * count, rel=0.01)


@pytest.mark.parametrize(
    "name", ["ZeRO 0", "adafactor, ZeRO 0", "adafactor, ZeRO 1", "muon, ZeRO 1", "muon, ZeRO 1, bf16"]
)
def test_our_engine_sends_while_the_backward_pass_runs_and_to_owners_alone(seen: dict[str, Any], name: str) -> None:
    """Half of what a sum for all ranks takes; and the weights that a rank owns are one broadcast."""
    shards = "ZeRO 1" in name
    for rank in seen[name]:
        order, moved, count = rank["order"], rank["moved"], rank["parameters"]
        last = max(place for place, what in enumerate(order) if what == "gradient")
        assert order.index("reduce" if shards else "allreduce") < last - 5
        assert moved["reduce float32" if shards else "allreduce float32"] == pytest.approx(4 * count, rel=0.03)
        assert order.count("broadcast") == (2 if shards else 0)
        if shards:
            assert moved.get("allreduce float32", 0) == 4, "the norm"
