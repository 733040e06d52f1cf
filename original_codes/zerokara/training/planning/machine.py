"""What `auto` came to on this machine, kept in the run folder: a run that goes on here computes as it did before.

A micro batch of another size adds the same numbers up in another order. So the choice is written down with all that it
was made for, and made again only when some of that has changed.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson

from zerokara.durable import write_json
from zerokara.training.planning import setting_names
from zerokara.training.planning.memory_budget import Question

FILE_NAME = "machine.json"


def chosen_for(question: Question) -> dict[str, Any]:
    """All that the choice of a micro batch depends on, except how busy the machine is at the moment."""
    config = question.config.model_copy(update={"micro_batch_size": 1})
    layout = asdict(replace(question, config=config).layout)
    del layout["shape"], layout["micro_batch"]
    gpu = {"gpu_bytes": question.there.device_bytes} if question.there.device == "cuda" else {}
    return {**question.shape.as_json(), **layout, **gpu, "global_batch_size": config.global_batch_size}


def micro_batch(question: Question, run_dir: Path) -> tuple[int, list[str]]:
    """What `micro_batch_size: auto` is for this run here, and a word where that has changed since its last start."""
    before = _read(run_dir)
    now = chosen_for(question)
    if before is None:
        return question.widest(), []
    if before["chosen_for"] == now:
        return before["micro_batch_size"], []
    chosen, was = question.widest(), before["micro_batch_size"]
    if chosen == was:
        return chosen, []
    why = "; ".join(setting_names.differences(before["chosen_for"], now))
    return chosen, [f"micro_batch_size: auto was {was}, is now {chosen} ({why}): the same sums in another order"]


def record(question: Question, run_dir: Path, chosen: int) -> None:
    """Keep the choice for the next start."""
    write_json(run_dir / FILE_NAME, {"micro_batch_size": chosen, "chosen_for": chosen_for(question)})


def is_recorded(question: Question, run_dir: Path) -> bool:
    """Whether this run has computed here before, with the same `auto`."""
    before = _read(run_dir)
    return before is not None and before["chosen_for"] == chosen_for(question)


def _read(run_dir: Path) -> dict[str, Any] | None:
    path = run_dir / FILE_NAME
    return orjson.loads(path.read_bytes()) if path.exists() else None
