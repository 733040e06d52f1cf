"""The checkpoint that an export is made from, and the run folder around it.

A run folder holds, besides its checkpoints: ``tokenizer.model``, ``config_resolved.yaml``, ``metrics.jsonl``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from zerokara import checkpoint, manifest
from zerokara.config.convert_config import ConvertSettings
from zerokara.config.loading import RESOLVED_NAME, load_run
from zerokara.config.pretrain_config import RunConfig
from zerokara.errors import Fault, UserError
from zerokara.model.shapes import ModelShape

if TYPE_CHECKING:  # torch is imported only when weights are read
    from torch import Tensor

EXPORTED_PARTS = ("weights", "state")
"""The parts of a checkpoint that are read; the optimizer state, two thirds of its bytes, is not."""
TOKENIZER_NAME = "tokenizer.model"
METRICS_NAME = "metrics.jsonl"
_CHECKPOINT_NAME = re.compile(r"global_step\d+")


@dataclass(frozen=True)
class CheckpointSource:
    """A complete checkpoint, checked by content."""

    run_dir: Path
    folder: Path
    state: checkpoint.TrainingState
    config: RunConfig

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer that the run was trained with."""
        return self.run_dir / TOKENIZER_NAME

    @cached_property
    def shape(self) -> ModelShape:
        """The shape of the model."""
        return ModelShape.from_json(self.state.shape)

    def weights(self) -> Mapping[str, Tensor]:
        """The fp32 weights, each read from disk when it is asked for."""
        return checkpoint.read_weights(self.folder)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` up to this checkpoint."""
        path = self.run_dir / METRICS_NAME
        lines: list[dict[str, Any]] = []
        for text in path.read_bytes().splitlines() if path.exists() else ():
            with suppress(orjson.JSONDecodeError):  # a line truncated by a crash
                lines.append(orjson.loads(text))
        return [line for line in lines if line.get("step", 0) <= self.state.step]


def find(settings: ConvertSettings) -> CheckpointSource:
    """Find the checkpoint that `input_model_dir` names, and check the exported parts of it by content.

    In a run folder that is the newest complete one; of a fine-tuning the one that was tested, the best by its metric.

    Raises:
        UserError: no such folder, no complete checkpoint, a damaged one, or another tokenizer than in training.
    """
    given = Path(settings.input_model_dir)
    if not given.is_dir():
        remedy = "name a run folder (output_model_dir of step 3) or one global_stepN folder in it"
        raise UserError(settings.fault("input_model_dir", "there is no such folder", remedy))
    skipped: list[str] = []
    folder: Path | None = None
    if _CHECKPOINT_NAME.fullmatch(given.resolve().name):
        folder = given.resolve()
    elif (given / RESOLVED_NAME).is_file() and load_run(given / RESOLVED_NAME).packs_examples:
        folder = checkpoint.best(given)
    if folder is not None:
        checkpoint.check(folder, EXPORTED_PARTS)
    else:
        folder = checkpoint.newest_complete(given, skipped.append, EXPORTED_PARTS)
    for message in skipped:
        print(message)
    if folder is None:
        rule = "no checkpoint in it is complete" if skipped else "there is no checkpoint (global_stepN) in it"
        remedy = "run step 3 until it has saved one (save_interval), or name another run folder"
        raise UserError(settings.fault("input_model_dir", rule, remedy))
    run_dir = folder.parent
    missing = [name for name in (TOKENIZER_NAME, RESOLVED_NAME) if not (run_dir / name).is_file()]
    if missing:
        rule, remedy = (
            "is missing next to the checkpoint",
            "keep the checkpoint in the run folder where step 3 wrote it",
        )
        raise UserError([Fault(where=str(run_dir / name), rule=rule, remedy=remedy) for name in missing])
    state, sha256 = checkpoint.read_state(folder), manifest.sha256_of(run_dir / TOKENIZER_NAME)
    if sha256 != state.tokenizer_sha256:
        trained = f"sha256 {sha256[:12]}, trained with {state.tokenizer_sha256[:12]}"
        rule = f"is not the tokenizer of {folder.name}: {trained}"
        raise UserError(Fault(where=str(run_dir / TOKENIZER_NAME), rule=rule, remedy="put the right file back"))
    return CheckpointSource(run_dir, folder, state, load_run(run_dir / RESOLVED_NAME))
