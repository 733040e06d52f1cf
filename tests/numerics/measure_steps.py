"""Watches what real training steps ask of a device and send between processes, each kind of run in fresh processes.

Reads a JSON file: a list of jobs {"processes": …, settings …}; prints a JSON list of objects for the second of two
steps, its edge included: `waits`, the operations that would make a GPU's host wait, by name, in the process with most;
and `moved`, bytes that collectives carry, by name and number format.
"""

import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import flash
import torch
import torch._inductor.compile_fx  # which torch.optim and DeepSpeed load when they are first used
import torch.distributed
from engines import open_with_weights
from forked import answers
from grouped import plain_grouped_mm
from torch.utils._python_dispatch import TorchDispatchMode

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import attention, experts, parallel
from zerokara.model.builder import build
from zerokara.model.experts import Routing
from zerokara.model.shapes import ModelShape
from zerokara.samples.objective import Causal
from zerokara.training.compute import zero  # noqa: F401  # DeepSpeed, once for all processes
from zerokara.training.compute.updater import load_template
from zerokara.training.guards import StepGuard
from zerokara.training.loop import train_step
from zerokara.training.processes.joining import Processes
from zerokara.training.run import StepBatches, as_tensors

VOCABULARY, END = 500, 2
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
        self._hosts: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        tensors = tensors_in((args, kwargs or {}))
        if func.namespace == "c10d":
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
    """Train two steps on random ids and watch the second."""
    warnings.simplefilter("ignore")
    # As on a GPU: the kernel for experts, and in bf16 that for documents.
    experts.has_kernel, experts.grouped_mm = lambda hidden: True, plain_grouped_mm
    attention.has_variable_length_kernel = lambda weight, head_dim: weight.dtype == torch.bfloat16
    flash.install()
    model = build(ModelShape.from_config(config, VOCABULARY), seed=1, routing=Routing.from_config(config))
    template = load_template(config.deepspeed_template)
    engine = open_with_weights(model, config, template, torch.device("cpu"))
    generator = torch.Generator().manual_seed(parallel.data_rank())
    guard = StepGuard(config.spike_sigmas, config.max_skipped_steps)
    processes = Processes(torch.device("cpu"), torch.distributed.get_rank())

    def batches() -> StepBatches:
        made = []
        for index in range(config.global_batch_size // config.micro_batch // parallel.data_size()):
            inputs, labels = (
                torch.randint(4, VOCABULARY, (config.micro_batch, length), generator=generator)
                for length in (config.lengths.input, config.lengths.target)
            )
            batch = [inputs, labels, torch.ones(labels.shape)]
            if config.intra_document_masking:
                ids = torch.cat([inputs, labels[:, -1:]], dim=1).numpy()
                ids[:, 3 :: 2 + index] = END  # another number of documents in each micro batch
                batch = as_tensors(Causal(config.lengths, END)(ids, ids[:, 0]))
                if model.shape.moe_layers:  # as of packed examples, the fourth segment padding
                    batch.append(torch.full_like(batch[0][:, 0], 3))
            made.append([*batch, labels] if config.traits.is_encoder_decoder else batch)
        return StepBatches(made, float(sum(batch[1].numel() for batch in made)))

    def step(number: int) -> None:
        train_step(engine, processes, iter([batches()]), number, 1e-3, guard, lambda: False)

    seen, to_list = Watch(), torch.Tensor.tolist

    # A list is read from a CPU's memory without the dispatcher; on a GPU it waits.
    def counted(tensor: torch.Tensor) -> Any:
        seen.waits["tolist"] += not seen.is_hosts(tensor)
        return to_list(tensor)

    step(1)
    with seen, mock.patch.object(torch.Tensor, "tolist", counted):
        step(2)
    return {"waits": seen.waits, "moved": seen.moved}


def watched(processes: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What the processes saw."""
    config = load(PretrainConfig, "/dev/null", [f"{key}={value}" for key, value in settings.items()])
    found = answers(processes, config.tensor_parallel_size, lambda: watch(config))
    return {
        "waits": max((each["waits"] for each in found), key=lambda waits: sum(waits.values())),
        "moved": found[0]["moved"],
    }


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(json.dumps([watched(job.pop("processes"), job) for job in jobs]))
