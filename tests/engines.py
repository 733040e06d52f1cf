"""Engines of a lone process, for tests that train a model without a run folder."""

from __future__ import annotations

import os
from unittest import mock

import torch

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import loopback, parallel
from zerokara.model.builder import Model
from zerokara.training.compute import updater
from zerokara.training.compute.engine import Engine
from zerokara.training.processes.joining import init_process_group


def join_alone(device: str = "cpu") -> None:
    """Be the only process of a run.

    RANK and WORLD_SIZE do not stay in the environment: a step that is called later would be a training process.
    """
    os.environ["LOCAL_RANK"] = "0"  # DeepSpeed asks for it
    with mock.patch.dict(os.environ, {**loopback.environment(), "RANK": "0", "WORLD_SIZE": "1"}):
        init_process_group(torch.device(device))
        parallel.start(seed=0)


def engine_of(model: Model, settings: PretrainConfig, chosen_for: int = 1) -> Engine:
    """Open an engine for a lone process, with the updater that a run of `chosen_for` data-parallel ranks has."""
    chosen = updater.choose(settings.zero_stage, settings.optimizer, settings.offload, chosen_for)
    return updater.open_engine(model, settings, chosen, data_parallel_size=1, template={})
