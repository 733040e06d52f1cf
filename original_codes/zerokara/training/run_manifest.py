"""The manifest of a finished run: what it was made from, what it made, and the facts that later steps read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerokara import checkpoint, manifest
from zerokara.progress import count_text, seconds_text
from zerokara.training.planning import run_folder
from zerokara.training.planning.preflight import baseline_text
from zerokara.training.planning.run_plan import RunPlan

_MONITORING = {"num_workers", "log_interval", "tensorboard", "wandb", "wandb_project", "keep_last", "keep_every"}
_MONITORING |= {"plots", "sample_prompts", "sample_tokens", "max_hours", "max_hours_per_start"}
"""Settings that change nothing in what is trained."""
_IN_IDENTITY = {"source_weights", "stages", "max_epochs_per_source", "intra_document_masking"}
"""Settings whose outcome stands in the run's identity."""


def record_path(plan: RunPlan) -> Path:
    """Return where the manifest of a run lies."""
    return plan.run_dir / run_folder.MANIFEST_NAME


def is_complete(plan: RunPlan) -> bool:
    """Whether the run folder holds just this run, finished. A run that is to be longer resumes instead."""
    path = record_path(plan)
    if path.exists() and plan.schedule.num_steps > manifest.read(path).facts["steps"]:
        return False
    return manifest.already_done(path, work_of(plan)) is not None


def write(plan: RunPlan, newest: Path) -> manifest.Manifest:
    """Write the manifest of a run that has ended at the checkpoint `newest`."""
    state = checkpoint.read_state(newest)
    facts: dict[str, Any] = {
        **state.facts,
        "steps": state.step,
        "tokens": state.tokens,
        "epochs": state.samples / plan.schedule.samples_per_epoch,
        "parameters": plan.shape.num_parameters(padded=False),
        "checkpoint": newest.name,
        "num_processes": plan.num_processes,
        "precision": state.precision,
        "sources": [asdict(use) for use in plan.consumption.sources],
        "unigram_entropy": plan.data.unigram_entropy,
    }
    made = {"metrics": plan.run_dir / run_folder.METRICS_NAME, "checkpoint": newest / "manifest.json"}
    return manifest.write(record_path(plan), work_of(plan), made, facts, state.seconds)


def summary_rows(
    made: manifest.Manifest, newest: Path, run_dir: Path, of_task: Sequence[tuple[str, str]] = ()
) -> list[tuple[str, str]]:
    """Return what a run has come to, for people, with the rows `of_task`."""
    facts, seconds = made.facts, made.seconds
    rows = [
        ("trained", f"{count_text(facts['tokens'])} tokens, {facts['epochs']:.3f} epochs, {facts['steps']:,} steps"),
        ("time", f"{seconds_text(seconds)}, {count_text(facts['tokens'] / seconds)} tok/s over all starts"),
        ("loss", f"{facts['first_loss']:.3f} → {facts['loss']:.3f} nats per token"),
        ("baseline", baseline_text(facts["unigram_entropy"])),
    ]
    if "valid_bits_per_byte" in facts:
        before, after = facts["first_valid_bits_per_byte"], facts["valid_bits_per_byte"]
        best, step = facts["best_valid_bits_per_byte"], facts["best_valid_step"]
        said = [f"{value:.3f}" if value is not None else "not finite" for value in (before, after, best)]
        rows.append(("validation", f"{said[0]} → {said[1]} bits per byte, best {said[2]} at step {step:,}"))
    rows += of_task
    rows.append(("checkpoint", str(newest)))
    further = (("plots", run_dir / "plots" / "overview.png"), ("samples", run_dir / "samples.md"))
    return [*rows, *((name, str(path)) for name, path in further if path.exists())]


def work_of(plan: RunPlan) -> manifest.StepSpec:
    """Return what a run is made from, for its manifest."""
    settings = plan.requested.model_dump(mode="json", exclude={*run_folder.PLACES, *_MONITORING, *_IN_IDENTITY})
    return manifest.StepSpec(
        step="3_train",
        settings={**settings, **run_folder.identity_of(plan), "steps": plan.schedule.num_steps},
        inputs={"tokenizer": Path(plan.requested.input_tokenizer_file)},
        key_of=run_folder.key_of,
    )
