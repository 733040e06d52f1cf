"""Saving while a run goes on: every process takes part in gathering the state, the first one writes it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed

from zerokara import checkpoint
from zerokara.checkpoint import TrainingState
from zerokara.progress import seconds_text
from zerokara.training.engine import Engine
from zerokara.training.preparation import Preparation


class Saver:
    """Writes checkpoints and deletes those that are kept no longer."""

    def __init__(self, preparation: Preparation, engine: Engine, rank: int, say: Callable[[str], None]):
        self._preparation, self._engine, self._rank, self._say = preparation, engine, rank, say

    def save(self, state: TrainingState) -> None:
        """Save; every process must call it."""
        started = time.monotonic()
        weights: dict[str, torch.Tensor] = {}
        moments: dict[str, torch.Tensor] = {}
        for kept, gathered in ((weights, self._engine.weights()), (moments, self._engine.moments())):
            for name, tensor in gathered:
                if self._rank == 0:
                    kept[name] = tensor
        if self._rank == 0:
            config, run_dir = self._preparation.config, self._preparation.run_dir
            folder = checkpoint.save(run_dir, state, weights, moments)
            checkpoint.prune(run_dir, config.keep_last, config.keep_every)
            self._say(f"step {state.step}  saved {folder} in {seconds_text(time.monotonic() - started)}")
        torch.distributed.barrier()

    def close(self) -> None:
        """Wait until everything is written."""
