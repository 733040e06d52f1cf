"""Results → `model-index` metadata at the head of a model card, as the Hub shows it.

In: a model's folder and sections. Out: its README.md with these results added, in place of older ones on the same data;
everything else in the card stays. Where step 4 wrote the folder, its manifest records the new README.md, so that step 6
still finds every file as it was made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from huggingface_hub import EvalResult, ModelCard

from zerokara import manifest
from zerokara.durable import write_file, write_json
from zerokara.errors import Fault, UserError
from zerokara.evaluation.results import Row, Section, interval_text
from zerokara.huggingface import exported_folder

CARD_NAME = "README.md"


def add(folder: Path, model: str, sections: Sequence[Section]) -> Path:
    """Add the values of the model named `model` to the card in its folder, which is made if there is none.

    Raises:
        UserError: the card was changed since step 4 proved the folder; its change would be recorded as step 4's.
    """
    path = folder / CARD_NAME
    record = _record(folder)
    if record is not None and manifest.sha256_of(path) != record["sha256"]:
        rule = "has changed since the export was proved"
        raise UserError(Fault(str(path), rule, remedy="run step 4 again with --redo, then add the results"))
    text = with_results(path.read_text(encoding="utf-8") if path.is_file() else "---\n{}\n---\n", model, sections)
    write_file(path, text)
    if record is not None:
        _record_again(folder, path)
    return path


def with_results(card: str, model: str, sections: Sequence[Section]) -> str:
    """The text of a card with results added."""
    content = ModelCard(card)
    data: Any = content.data  # a ModelCardData
    new = [_result(row, section) for section in sections for row in section.rows if row.model == model]
    added = [result for result in new if result is not None]
    kept = [old for old in data.eval_results or [] if not any(_same(old, result) for result in added)]
    if not added:
        return card
    data.eval_results = [*kept, *added]
    data.model_name = data.model_name or model
    return str(content)


def _result(row: Row, section: Section) -> EvalResult | None:
    if row.value is None:
        return None
    interval = f"95 % interval {interval_text(row.interval, section)}, " if row.interval else ""
    data = str(section.facts.get("text", section.name))
    return EvalResult(
        task_type="text-generation",
        dataset_type=re.sub(r"[^\w.-]+", "-", data),  # what the Hub tells data sets apart by
        dataset_name=data,
        metric_type=section.metric,
        metric_name=f"{section.metric.replace('_', ' ')} ({interval}n = {row.n:,})",
        metric_value=round(row.value, section.digits),
    )


def _same(old: EvalResult, new: EvalResult) -> bool:
    return all(
        getattr(old, key) == getattr(new, key) for key in ("task_type", "dataset_type", "dataset_name", "metric_type")
    )


def _record(folder: Path) -> dict[str, Any] | None:
    """The record of README.md in the manifest of step 4; None for a folder of somebody else."""
    path = folder / exported_folder.MANIFEST_NAME
    try:
        raw = orjson.loads(path.read_bytes())
        found = [each for records in raw["outputs"].values() for each in records if each["path"] == CARD_NAME]
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None
    return found[0] if raw.get("step") == exported_folder.STEP and found else None


def _record_again(folder: Path, card: Path) -> None:
    path = folder / exported_folder.MANIFEST_NAME
    raw = orjson.loads(path.read_bytes())
    status = os.stat(card)
    for records in raw["outputs"].values():
        for each in records:
            if each["path"] == CARD_NAME:
                each |= {
                    "bytes": status.st_size,
                    "sha256": manifest.sha256_of(card),
                    "modified_ns": status.st_mtime_ns,
                }
    write_json(path, raw)
