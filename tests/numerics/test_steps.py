"""What a training step asks of its device, and what it sends; watched in steps of every kind."""

import json
import math
import re
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
from engines import OF_A_LARGE_MODEL, open_with_weights
from forked import answers_of
from grouped import plain_grouped_mm
from step_kinds import KINDS, VOCABULARY, stepper
from torch.utils._python_dispatch import TorchDispatchMode

from zerokara.config.deepspeed_template import load_template
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import attention, experts, layers, parallel
from zerokara.model.shapes import ModelShape
from zerokara.training.processes.joining import Processes

pytestmark = pytest.mark.slow
MODEL = {"num_layers": 2, "hidden_size": 64, "num_attn_heads": 4, "seq_len": 32}
BATCH = {"global_batch_size": 8, "micro_batch_size": 2}
"""Gradient accumulation, with two processes too."""
IN_BF16 = ("ZeRO 1", "ZeRO 2", "ZeRO 3", "muon, ZeRO 1", "adafactor, ZeRO 3", "masking, checkpointing")
RUNS: dict[str, dict[str, Any]] = {
    **KINDS,
    **{f"{name}, bf16": {**KINDS[name], "precision": "bf16"} for name in IN_BF16},
    "tensor parallel": {"tensor_parallel_size": 2},
    "tensor parallel, ZeRO 1": {"tensor_parallel_size": 2, "zero_stage": 1},
}  # fmt: skip
SHIPPED = load_template("auto")["zero_optimization"]
SMALL: dict[str, Any] = {"reduce_bucket_size": 30_000}
TEMPLATES = {
    "reduce_bucket_size": SMALL,
    "overlap_comm": {**SMALL, "overlap_comm": True},
    "round_robin_gradients": {"round_robin_gradients": True},
}
"""With keys of DeepSpeed's that config.yaml does not own."""
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
    experts.has_kernel, experts.grouped_mm = lambda *_: True, plain_grouped_mm
    attention.has_variable_length_kernel = lambda weight, head_dim: weight.dtype == torch.bfloat16
    layers.is_batch_first = lambda _: True
    flash.install()
    model = build(ModelShape.from_config(config, VOCABULARY), seed=1, settings=config)
    template = load_template(config.deepspeed_template)
    template["zero_optimization"] |= OF_A_LARGE_MODEL
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
    sizes = {name: math.prod(each) for name, each in model.shape.parameter_shapes().items()}
    in_matrices = sum(size for name, size in sizes.items() if ".layers." in name and "norm" not in name)
    counts = {"parameters": sum(sizes.values()), "in_matrices": in_matrices}
    held = {name: list(map(len, place.ranges)) for name, place in engine.optimizer._places.items()}
    return {"waits": seen.waits, "moved": seen.moved, "order": seen.order, "held": held, **counts}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, python_path: None, warm_server: Path | None) -> dict[str, Any]:
    common = {**RECIPE, **MODEL, **BATCH, "precision": "fp32"}
    jobs, folder = {name: {**common, **settings} for name, settings in RUNS.items()}, tmp_path_factory.mktemp("steps")
    for key, values in TEMPLATES.items():
        template = folder / f"{key}.json"
        template.write_text(json.dumps({"zero_optimization": SHIPPED | values}), encoding="utf-8")
        jobs[key] = {**common, "zero_stage": 1, "deepspeed_template": str(template)}
    return answers_of(watch, jobs, folder, warm_server)


@pytest.mark.parametrize("name", RUNS)
def test_the_host_waits_once_a_step_and_nothing_is_summed_in_bf16(seen: dict[str, Any], name: str) -> None:
    assert max(sum(rank["waits"].values()) for rank in seen[name]) == 1, seen[name]
    # Whatever is summed and exchanged: gradients, updates, the numbers of a step.
    kinds = [kind.split() for kind in seen[name][0]["moved"]]
    assert {dtype for operation, dtype in kinds if "allgather" not in operation} <= {"float32", "float64"}


@pytest.mark.parametrize(
    "name", [name for name in RUNS if re.fullmatch(r"((muon|adafactor), )?ZeRO \d(, bf16)?", name)]
)
def test_what_a_step_sends(seen: dict[str, Any], name: str) -> None:
    """Bytes of what collectives are given and give, of two ranks and two micro batches.

    Gradients go to their owners in fp32: at stage 1 once a step, else in each micro batch. Weights come back as they
    compute: at stages 1 and 2 once a step, at stage 3 for each forward and each backward pass. Muon and Adafactor send
    what is cut twice: gradients to a matrix's owner, and its update back.
    """
    stage, width = int(name.partition("ZeRO ")[2][0]), 2 if "bf16" in name else 4
    count, matrices = seen[name][0]["parameters"], seen[name][0]["in_matrices"]
    for rank in seen[name]:
        moved = rank["moved"]
        gradients = sum(moved.get(f"{kind} float32", 0) for kind in ("reduce", "_reduce_scatter_base"))
        assert gradients == pytest.approx(4 * count * min(stage, 2) * (1.5 if stage == 3 else 1), rel=0.02)
        gathered = sum(size for kind, size in moved.items() if kind.startswith("_allgather_base")) / 1.5 / width
        assert gathered == pytest.approx((4 if stage == 3 else 1) * count, rel=0.02)
        assert moved.get("allreduce float32", 0) < 4 * 100, "norms"
    exchanged = sum(rank["moved"].get("alltoall_base float32", 0) for rank in seen[name]) / 2  # given and got
    whole = 4 * (count if "adafactor" in name else matrices if "muon" in name else 0)
    if stage == 3:
        assert exchanged == pytest.approx(2 * whole, rel=0.02), "there and back"
    else:
        assert exchanged < whole or not whole, "what the border cuts"


def test_the_template_acts(seen: dict[str, Any]) -> None:
    """Smaller sums, sums beside the backward pass, parameters dealt out in turn."""

    def sums(name: str) -> list[int]:
        return [place for place, what in enumerate(seen[name][0]["order"]) if what == "reduce"]

    def last_gradient(name: str) -> int:
        return max(place for place, what in enumerate(seen[name][0]["order"]) if what == "gradient")

    assert min(len(sums("reduce_bucket_size")), len(sums("overlap_comm"))) > len(sums("ZeRO 1"))
    assert sums("reduce_bucket_size")[0] > last_gradient("reduce_bucket_size"), "as DeepSpeed has it"
    assert sums("overlap_comm")[0] < last_gradient("overlap_comm") - 5
    assert seen["round_robin_gradients"][0]["held"] != seen["ZeRO 1"][0]["held"]
