"""lm-evaluation-harness takes an export by the command that docs/evaluation.md shows, and measures what step 8 does."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from clients.client_exports import PACKAGES, ROOT, Exports, client
from corpus_files import write_texts
from made_runs import corpus_lines

from zerokara.config.evaluate_config import EvaluateConfig
from zerokara.evaluation import bits_per_byte
from zerokara.evaluation.inputs import MeasuredText
from zerokara.evaluation.models import open_models


def test_the_documented_command_gives_ours(exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = tuple(corpus_lines(20))
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    for folder in ("models", "tasks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "models" / "my_model_hf").symlink_to(exports["llama"])
    (task,) = re.findall(r"```yaml\n(# tasks/held_out.yaml\n.*?)```", page, flags=re.DOTALL)
    (tmp_path / "tasks" / "held_out.yaml").write_text(task, encoding="utf-8")
    write_texts(tmp_path / "data" / "held_out.jsonl", documents)
    (model,) = open_models([exports["llama"]], "cpu")
    text, settings = MeasuredText("text", documents, 20), EvaluateConfig()
    (row,) = next(bits_per_byte.measure_texts([text], [model], settings)).rows
    (command,) = re.findall(r"/lm_eval (run .*?)```", page, flags=re.DOTALL)
    assert model.tokenizer.eos_token_id == 2 and "prefix_token_id=2" in command
    found = harness(command, tmp_path)
    assert found == pytest.approx(row.value, abs=1e-3)
    windowing = bits_per_byte.windowing_of(model, settings)
    assert isinstance(windowing, bits_per_byte.Windowing)
    monkeypatch.setattr(bits_per_byte, "windowing_of", lambda *_: replace(windowing, start_id=9))
    (other,) = next(bits_per_byte.measure_texts([text], [model], settings)).rows
    assert other.value is not None and abs(found - other.value) > 2e-3, "another start gives another number"


def harness(command: str, place: Path) -> float:
    words = shlex.split(command.replace("\\\n", ""))
    client(PACKAGES / "harness/bin/lm_eval", "harness", *words, cwd=place, HF_HOME=str(place / "cache"))
    (results,) = (place / "evaluation" / "harness").rglob("results_*.json")
    return float(json.loads(results.read_text(encoding="utf-8"))["results"]["held_out"]["bits_per_byte,none"])
