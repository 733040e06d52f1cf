"""Validation of a checkpoint by itself (step 3's ``--evaluate``): the number that the log has for its step.

The weights alone are loaded, rounded as the run computes with them, whole in each process (or cut as
`tensor_parallel_size` says): no optimizer, no ZeRO, so that any number of processes gives the same. The result goes
into ``evaluation_step<N>.json`` in the folder that holds the checkpoint, which itself is never touched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from zerokara import checkpoint
from zerokara.durable import write_json
from zerokara.progress import summary
from zerokara.training.evaluation import Validation, ValidationResult
from zerokara.training.monitoring import metrics
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.run import build_model, join


def evaluate(plan: RunPlan, folder: Path) -> None:
    """Evaluate the checkpoint in `folder`; every training process calls it, the first one logs and writes."""
    processes = join(plan)
    model = build_model(plan, processes, seed=None)
    weights = checkpoint.read_weights(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.sharding.local(name, weights[name]))
    model.to(torch.bfloat16 if plan.config.precision == "bf16" else torch.float32).to(processes.device)
    result = Validation(plan, processes.device)(model)
    assert result is not None
    if processes.is_first:
        _report(plan, folder, result)


def _report(plan: RunPlan, folder: Path, result: ValidationResult) -> None:
    step, whole = checkpoint.read_state(folder).step, result.whole
    # What the run itself found at that step, if it validated there.
    found = [
        line["valid_loss"] for line in metrics.read(folder.parent) if line["step"] == step and "valid_loss" in line
    ]
    logged = found[-1] if found else None
    path = folder.parent / f"evaluation_step{step}.json"
    record: dict[str, Any] = {
        "checkpoint": folder.name,
        "step": step,
        "precision": plan.config.precision,
        "tokenizer_sha256": plan.tokenizer_sha256,
        **result.as_json(),
        "sources": [score.name for score in result.sources],
        "logged_valid_loss": logged,
    }
    write_json(path, record)
    rows = [("validation", f"{whole.loss:.4f} nats per token, {whole.bits_per_byte:.4f} bits per byte")]
    rows += [(score.name, f"{score.loss:.4f}, {score.bits_per_byte:.4f}") for score in result.sources]
    rows.append(("tokens", f"{whole.num_tokens:,}"))
    if logged is not None:
        rows.append(("in the log", f"{logged:.4f} nats per token, so it differs by {abs(whole.loss - logged):.1e}"))
    summary(f"evaluated {folder}", [*rows, ("written to", str(path))])
