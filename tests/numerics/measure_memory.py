"""Measures the tensors that training processes hold, each in a fresh process.

Reads a JSON file: a list of jobs {"processes": …, settings …}; prints a JSON list of objects: the most bytes of tensors
that any process held `within` a backward pass, at its end, and `between` two; and those of the state that is `saved`.
"""

import gc
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx  # which torch.optim and DeepSpeed load when they are first used
import torch.distributed
from engines import open_with_weights
from forked import answers

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import parallel
from zerokara.model.builder import build
from zerokara.model.shapes import ModelShape
from zerokara.training.compute import zero  # noqa: F401  # DeepSpeed, once for all processes
from zerokara.training.compute.engine import master_weights, optimizer_state
from zerokara.training.compute.updater import load_template

VOCABULARY = 500


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
    """The least of a few looks: a thread of gloo's lets go of a finished sum's tensor when it gets to it."""
    looks = [tensor_bytes()]
    for _ in range(2):
        time.sleep(0.02)
        looks.append(tensor_bytes())
    return min(looks)


def train(config: PretrainConfig) -> dict[str, int]:
    """Train for two steps on random ids and measure in the second."""
    warnings.simplefilter("ignore")  # objects of torch that warn when they are asked for their class
    before = tensor_bytes()
    model = build(ModelShape.from_config(config, VOCABULARY), seed=1)
    first_layer = next(iter(model.all_layers()))
    template = load_template(config.deepspeed_template)
    engine = open_with_weights(model, config, template, torch.device("cpu"))
    del model
    within, between = [0], [0]

    def at_end_of_backward(module: torch.nn.Module, args: tuple[Any, ...], others: dict[str, Any]) -> None:
        hidden = next(one for one in (*args, *others.values()) if isinstance(one, torch.Tensor) and one.requires_grad)
        hidden.register_hook(lambda gradient: within.append(tensor_bytes() - before))

    first_layer.register_forward_pre_hook(at_end_of_backward, with_kwargs=True)
    generator = torch.Generator().manual_seed(parallel.data_rank())
    for _ in range(2):
        for _ in range(config.global_batch_size // config.micro_batch // parallel.data_size()):
            inputs, labels = (
                torch.randint(4, VOCABULARY, (config.micro_batch, length), generator=generator)
                for length in (config.lengths.input, config.lengths.target)
            )
            engine.accumulate([inputs, labels, torch.ones(labels.shape)], float(labels.numel()), len(labels))
            between.append(settled_bytes() - before)
        engine.update(1e-3)
    saved = sum(4 * tensor.numel() for part in (master_weights(engine), optimizer_state(engine)) for _, tensor in part)
    return {"within": max(within), "between": max(between), "saved": saved}


def measure(processes: int, settings: dict[str, Any]) -> dict[str, int]:
    """The largest of what the processes measured."""
    given = [f"{key}={value}" for key, value in settings.items()]
    config = load(PretrainConfig, "/dev/null", given)
    found = answers(processes, config.tensor_parallel_size, lambda: train(config))
    return {key: max(one[key] for one in found) for key in found[0]}


if __name__ == "__main__":
    gc.collect()
    gc.freeze()  # a million objects of the libraries, which each look at the tensors would go through
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(json.dumps([measure(job.pop("processes"), job) for job in jobs]))
