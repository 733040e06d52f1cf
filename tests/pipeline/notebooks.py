"""Notebooks run from top to bottom on a CPU, as Jupyter does."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]


def execute(name: str, model: Path, prompts: Sequence[str], monkeypatch: pytest.MonkeyPatch, **edits: str) -> Any:
    """Run a notebook, which is kept without outputs, on a model; `edits` replace the values of lines marked 🎛."""
    notebook = nbformat.read(ROOT / name, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    for key, value in edits.items():
        (cell,) = (cell for cell in cells if f"\n{key} = " in "\n" + cell.source)
        lines = cell.source.splitlines()
        (number,) = (number for number, line in enumerate(lines) if line.startswith(f"{key} = "))
        assert "🎛" in lines[number]
        lines[number] = f"{key} = {value}"
        cell.source = "\n".join(lines)
    settings = model / "my_convert_config.yaml"
    settings.write_text(f"test_prompt_text: {json.dumps(list(prompts), ensure_ascii=False)}\n", encoding="utf-8")
    monkeypatch.setenv("ZEROKARA_CONVERT_CONFIG", str(settings))
    monkeypatch.setenv("ZEROKARA_MODEL_DIR", str(model))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "original_codes"))
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}})
    done = client.execute()
    assert f"python 6_upload.py --config {settings}" in printed(done)
    return done


def outputs(notebook: Any, kind: str) -> list[str]:
    every = (output for cell in notebook.cells for output in cell.get("outputs", []))
    return [output.data[kind] for output in every if kind in output.get("data", {})]


def printed(notebook: Any) -> str:
    every = (output for cell in notebook.cells for output in cell.get("outputs", []))
    return "".join(output.text for output in every if output.output_type == "stream")
