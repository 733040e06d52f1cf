"""Engines of a lone process, for tests that train a model without a run folder."""

import os
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed

from zerokara.base.resources import network_environment
from zerokara.config.deepspeed_template import load_template
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import parallel
from zerokara.model.builder import Model
from zerokara.model.megatron_core import parallel_state
from zerokara.model.shapes import ModelShape
from zerokara.training.compute import engine_choice
from zerokara.training.compute.engine import Engine
from zerokara.training.processes.joining import init_process_group, local_device

OF_A_LARGE_MODEL = {
    "stage3_param_persistence_threshold": 100, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
}  # fmt: skip
"""By default ZeRO 3 partitions no matrix as small as these, and keeps what it has gathered for the backward pass."""


def join_alone(device: str = "cpu") -> None:
    """Be the only process of a run, joined by the backend of this device whatever an earlier test has opened.

    RANK and WORLD_SIZE do not stay in the environment: a step that is called later would be a training process.
    """
    backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
    if torch.distributed.is_initialized() and torch.distributed.get_backend() != backend:
        leave()
    os.environ["LOCAL_RANK"] = "0"  # DeepSpeed asks for it
    with mock.patch.dict(os.environ, {**network_environment(), "RANK": "0", "WORLD_SIZE": "1"}):
        init_process_group(torch.device(device))
        parallel.start(seed=0)


def leave() -> None:
    """Close the process groups of this process, with what megatron-core and DeepSpeed remember of them."""
    if not torch.distributed.is_initialized():
        return
    parallel_state.destroy_model_parallel()
    if (deepspeed_comm := sys.modules.get("deepspeed.comm.comm")) and deepspeed_comm.cdb is not None:
        deepspeed_comm.destroy_process_group()
        deepspeed_comm.cdb = None  # it would keep the backend's name, and take itself for initialized
    else:
        torch.distributed.destroy_process_group()


def require_backend(backend: str) -> None:
    """Assert that the groups of this process, which `join_alone` has opened, are this backend's."""
    groups = {"default": None, "tensor": parallel.tensor_group(), "data": parallel.data_group()}
    backends = {name: torch.distributed.get_backend(group) for name, group in groups.items()}
    assert set(backends.values()) == {backend}, f"{backends}, where {backend} is tested"


def engine_of(model: Model, settings: PretrainConfig, chosen_for: int = 1) -> Engine:
    """Open for a lone process the engine that a run of `chosen_for` data-parallel ranks has."""
    uses = engine_choice.uses_deepspeed(settings, chosen_for)
    with mock.patch.object(engine_choice, "uses_deepspeed", lambda *_: uses):
        return open_with_weights(model, settings, load_template("auto"), local_device())


def open_with_weights(model: Model, settings: PretrainConfig, template: dict[str, Any], device: torch.device) -> Engine:
    """Open an engine that begins with the weights of `model`, unrounded."""
    if deepspeed_groups := sys.modules.get("deepspeed.utils.groups"):  # it has the hierarchy of an engine before this
        deepspeed_groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    weights = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    engine = engine_choice.open_engine(model, settings, template, device)
    for name, weight in weights:
        engine.optimizer.write(name, None, weight)
    engine.round_masters()
    return engine


def random_batch(shape: ModelShape, size: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Arguments of a model: ids, labels, loss mask, numbers of the sequences, and a decoder's input."""
    ids = torch.randint(0, shape.vocab_size, (size, shape.seq_len), generator=generator)
    labels = torch.randint(0, shape.vocab_size, (size, shape.target_len), generator=generator)
    batch = [ids, labels, torch.ones(labels.shape), torch.arange(size)]
    return [*batch, labels.roll(1, dims=1)] if shape.traits.is_encoder_decoder else batch


def chains(num_steps: int, batch: int, length: int, vocab_size: int) -> list[torch.Tensor]:
    """Batches of a first-order Markov chain, [batch, length + 1]: something to learn, so that the losses move.

    Never id 3: Hugging Face's embedding takes no gradient for the padding id, and training data holds none.
    """
    generator = torch.Generator().manual_seed(3)
    following = torch.randint(4, vocab_size, (vocab_size, 2), generator=generator)
    batches = []
    for _ in range(num_steps):
        ids = [torch.randint(4, vocab_size, (batch,), generator=generator)]
        for _ in range(length):
            ids.append(following[ids[-1], torch.randint(0, 2, (batch,), generator=generator)])
        batches.append(torch.stack(ids, dim=1))
    return batches
