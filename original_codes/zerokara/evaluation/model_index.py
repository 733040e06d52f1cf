"""Results → `model-index` metadata at the head of a model card, as the Hub shows it.

In: a model's folder and sections. Out: its README.md with these results added, in place of older ones on the same data;
everything else in the card stays. Where step 4 wrote the folder, its manifest records the new README.md, so that step 6
still finds every file as it was made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
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
    path, manifest_path = folder / CARD_NAME, folder / exported_folder.MANIFEST_NAME
    records: list[dict[str, Any]] = []  # of the card, in the manifest of step 4; none for a folder of somebody else
    with suppress(OSError, orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        raw = orjson.loads(manifest_path.read_bytes())
        if raw["step"] == exported_folder.STEP:
            records = [each for outputs in raw["outputs"].values() for each in outputs if each["path"] == CARD_NAME]
    if records and manifest.sha256_of(path) != records[0]["sha256"]:
        rule = "has changed since the export was proved"
        raise UserError(Fault(str(path), rule, remedy="run step 4 again with --redo, then add the results"))
    text = with_results(path.read_text(encoding="utf-8") if path.is_file() else "---\n{}\n---\n", model, sections)
    write_file(path, text)
    if records:
        status = os.stat(path)
        for each in records:
            each |= {"bytes": status.st_size, "sha256": manifest.sha256_of(path), "modified_ns": status.st_mtime_ns}
        write_json(manifest_path, raw)
    return path


def with_results(card: str, model: str, sections: Sequence[Section]) -> str:
    """Text of a card with results added."""
    content = ModelCard(card)
    data: Any = content.data  # a ModelCardData
    rows = [(row, section) for section in sections for row in section.rows if row.model == model]
    added = [_result(row, row.value, section) for row, section in rows if row.value is not None]
    if not added:
        return card
    replaced = set(map(_measured, added))
    data.eval_results = [*(old for old in data.eval_results or [] if _measured(old) not in replaced), *added]
    data.model_name = data.model_name or model
    return str(content)


def _result(row: Row, value: float, section: Section) -> EvalResult:
    interval = f"95 % interval {interval_text(row.interval, section)}, " if row.interval else ""
    data = str(section.facts.get("text", section.name))
    return EvalResult(
        task_type="text-generation",
        dataset_type=re.sub(r"[^\w.-]+", "-", data),  # what the Hub tells data sets apart by
        dataset_name=data,
        metric_type=section.metric,
        metric_name=f"{section.metric.replace('_', ' ')} ({interval}n = {row.n:,})",
        metric_value=round(value, section.digits),
    )


def _measured(result: EvalResult) -> tuple[str, ...]:
    """What a result measures: an older one of the same is replaced."""
    return result.task_type, result.dataset_type, result.dataset_name, result.metric_type
