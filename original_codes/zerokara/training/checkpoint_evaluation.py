"""Validation of a checkpoint by itself (step 3's ``--evaluate``): the number that the log has for its step.

The weights alone are loaded, rounded as the run computes with them, whole in each process (or cut as
`tensor_parallel_size` says): no optimizer, no ZeRO, so that any number of processes gives the same. The result goes
into ``evaluation_step<N>.json`` in the folder that holds the checkpoint, which itself is never touched.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from zerokara import checkpoint
from zerokara.durable import write_json
from zerokara.errors import Fault, UserError
from zerokara.model.megatron import Model, build
from zerokara.progress import summary
from zerokara.training.compute import devices
from zerokara.training.evaluation import Validation, ValidationResult, ValidationSettings
from zerokara.training.monitoring import metrics
from zerokara.training.planning.preparation import Preparation
from zerokara.training.processes import joining


def evaluate(preparation: Preparation, folder: Path) -> None:
    """Evaluate the checkpoint in `folder`; every training process calls it, the first one speaks and writes."""
    device = devices.local_device(int(os.environ.get("LOCAL_RANK", "0")))
    joining.join(preparation, device)
    model = _loaded(preparation, folder).to(device)
    settings = ValidationSettings.from_config(preparation.config, preparation.reading.sources)
    result = Validation(settings, preparation.objective, preparation.encoder, device)(model)
    assert result is not None
    if torch.distributed.get_rank() == 0:
        _report(preparation, folder, result)


def _loaded(preparation: Preparation, folder: Path) -> Model:
    model = build(preparation.shape, seed=None)
    weights = checkpoint.read_weights(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.sharding.local(name, weights[name]))
    return model.to(torch.bfloat16 if preparation.config.precision == "bf16" else torch.float32)


def _report(preparation: Preparation, folder: Path, result: ValidationResult) -> None:
    step = checkpoint.read_state(folder).step
    logged = logged_loss(folder.parent, step)
    path = result_path(folder, step)
    record: dict[str, Any] = {
        "checkpoint": folder.name,
        "step": step,
        "precision": preparation.config.precision,
        "tokenizer_sha256": preparation.tokenizer_sha256,
        **result.as_json(),
        "sources": [score.name for score in result.sources],
        "logged_valid_loss": logged,
    }
    write_json(path, record)
    rows = [("validation", f"{result.loss:.4f} nats a token, {result.bits_per_byte:.4f} bits per byte")]
    rows += [(score.name, f"{score.loss:.4f}, {score.bits_per_byte:.4f}") for score in result.sources]
    rows.append(("tokens", f"{result.whole.num_tokens:,}"))
    if logged is not None:
        rows.append(("in the log", f"{logged:.4f} nats a token, so it differs by {abs(result.loss - logged):.1e}"))
    summary(f"evaluated {folder}", [*rows, ("written to", str(path))])


def result_path(folder: Path, step: int) -> Path:
    """Where the numbers of a checkpoint are written."""
    return folder.parent / f"evaluation_step{step}.json"


def logged_loss(run_dir: Path, step: int) -> float | None:
    """What the run itself found at that step, if it validated there."""
    found = [line["valid_loss"] for line in metrics.read(run_dir) if line["step"] == step and "valid_loss" in line]
    return found[-1] if found else None


def find(preparation: Preparation, name: str) -> Path:
    """The checkpoint that is meant by `name`, once it was found whole and fitting: a folder, or a name or a step in the
    run folder (``global_step100``, ``100``, ``best``), or if it is empty the newest.

    Raises:
        UserError: there is no such checkpoint, it is broken, it is of another model, or there is nothing to validate
            with.
    """
    run_dir = preparation.run_dir
    if not preparation.num_valid_tokens:
        rule = "step 2 kept no documents for validation"
        raise UserError(
            preparation.given.fault("valid_fraction", rule, "give it a share, and run step 2 again with --redo")
        )
    if not name:
        newest = checkpoint.newest_complete(run_dir)
        if newest is None:
            raise UserError(Fault(where=str(run_dir), rule="holds no whole checkpoint", remedy="train first"))
        folder = newest
    else:
        marked = run_dir / name  # `best` and `latest` are files that name a checkpoint
        named = marked.read_text(encoding="utf-8").strip() if marked.is_file() else name
        number = int(name) if name.isdecimal() else -1
        candidates = [Path(named), run_dir / named, checkpoint.folder_of(run_dir, number)]
        there = [path for path in candidates if path.is_dir()]
        if not there:
            steps = ", ".join(str(step) for step in checkpoint.all_steps(run_dir)) or "none"
            rule = f"is no checkpoint, neither by itself nor in {run_dir}; that has those of the steps {steps}"
            raise UserError(Fault(where="--evaluate", rule=rule, found=name))
        folder = there[0]
        checkpoint.check(folder)
    state = checkpoint.read_state(folder)
    for what, was, now in (
        ("model", state.shape, preparation.shape.as_json()),
        ("tokenizer", state.tokenizer_sha256, preparation.tokenizer_sha256),
    ):
        if was != now:
            raise UserError(Fault(where=str(folder), rule=f"is of another {what} than the configuration's"))
    return folder
