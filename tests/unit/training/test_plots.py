"""The plots of a run, and the process that draws them."""

import struct
import subprocess
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
from configs import config_of
from matplotlib.figure import Figure

from zerokara.config.loading import RESOLVED_NAME
from zerokara.config.writing import as_yaml
from zerokara.training.monitoring import plots, step_metrics
from zerokara.training.monitoring.step_metrics import Plots, Recorder


def run_lines(**more: Any) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [{"step": 0, "tokens": 0, "valid_loss": 6.0, "valid_bits_per_byte": 3.0}]
    for step in range(1, 60):
        numbers = {"loss": 6 / step**0.2, "learning_rate": 0.1, "grad_norm": 1.0, "tokens_per_second": 5e3}
        lines.append({"step": step, "tokens": step * 1000, **numbers, **more})
    lines.append({"step": 20, "tokens": 20_000, "resumed": True})
    lines.append({"step": 30, "tokens": 30_000, "skipped": "the loss is nan", "bad_samples": []})
    lines.append({"step": 59, "tokens": 59_000, "valid_loss": 2.7, "valid_bits_per_byte": 1.4})
    return lines


def write_run(run_dir: Path, **more: Any) -> None:
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in run_lines(**more)))


def test_every_curve_has_its_plot_and_all_have_one(tmp_path: Path) -> None:
    assert plots.draw(tmp_path) == [] and not (tmp_path / "plots").exists(), "there is no step yet"
    write_run(tmp_path / "run", source_tokens=[10, 20], mfu_causal=0.4, expert_load=[1.5, 2.0])
    drawn = plots.draw(tmp_path / "run")
    names = ["overview", "loss", "bits_per_byte", "learning_rate", "grad_norm", "throughput", "sources", "experts"]
    assert [path.name for path in drawn] == [f"{name}.png" for name in names]
    for path in drawn:
        head = path.read_bytes()[:24]
        width, height = struct.unpack(">II", head[16:])
        assert head.startswith(b"\x89PNG") and width >= 900 and height >= 500 and path.stat().st_size > 10_000
    assert sorted(path.name for path in (tmp_path / "run" / "plots").iterdir()) == sorted(f"{n}.png" for n in names)


def names_of(run_dir: Path, **settings: Any) -> dict[str, list[str]]:
    (run_dir / RESOLVED_NAME).write_text(as_yaml(config_of(**settings)), encoding="utf-8")
    return plots.curve_names(run_dir)


def test_a_source_is_called_by_its_file_and_those_of_one_name_are_told_apart(tmp_path: Path) -> None:
    entries = ("a/text.jsonl", "hf://datasets/owner/books@v1", "b/text.jsonl", "x" * 40)
    names = names_of(tmp_path, input_jsonl=entries)
    assert names["sources"] == ["1 text.jsonl", "books@v1", "3 text.jsonl", "x" * 28]


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"architecture": "qwen3_moe", "num_layers": 6, "moe_layers": (1, 3, 5)}, ["layer 1", "layer 3", "layer 5"]),
        ({"architecture": "switch", "num_layers": 2}, ["encoder layer 1", "decoder layer 1"]),
        ({"architecture": "llama"}, []),
    ],
)
def test_a_layer_with_experts_has_its_number(tmp_path: Path, settings: dict[str, Any], layers: list[str]) -> None:
    assert names_of(tmp_path, **settings)["layers"] == layers


def test_a_name_is_no_formula_and_is_not_left_out(tmp_path: Path) -> None:
    write_run(folder := tmp_path / "a$x_{b$c")
    config = config_of(input_jsonl=("_a$x_{b$.jsonl", "c.jsonl"))
    (folder / RESOLVED_NAME).write_text(as_yaml(config), encoding="utf-8")
    assert plots.draw(folder)
    names = plots.curve_names(folder)["sources"]
    assert len(names) == 2 and not any(name.startswith("_") for name in names)


def test_the_curves_of_sources_begin_anew_where_others_are_held_out(tmp_path: Path) -> None:
    """A name is that of the newest configuration: no earlier number may stand under it."""

    def line(step: int, bits: list[float], positions: list[int]) -> dict[str, Any]:
        each = {"valid_bits_per_byte_by_source": bits, "valid_source_positions": positions, "valid_bits_per_byte": 2.0}
        return {"step": step, "tokens": step, **each}

    lines = [line(0, [3.0, 2.9, 2.8], [0, 1, 2]), line(1, [2.5, 2.4], [0, 2]), line(2, [2.3, 2.2], [0, 2])]
    axes = Figure().subplots()
    plots._bits_per_byte(axes, plots._curves(lines), {"sources": ["a", "b", "c"], "layers": []})
    shown = {str(curve.get_label()): list(curve.get_data()) for curve in axes.lines}
    assert [*map(list, shown["a"])] == [[1, 2], [2.5, 2.3]] and [*map(list, shown["c"])] == [[1, 2], [2.4, 2.2]]
    assert "b" not in shown and list(shown["all"][0]) == [0, 1, 2]


def test_without_a_readable_configuration_curves_are_numbered(tmp_path: Path) -> None:
    assert plots.curve_names(tmp_path) == {"sources": [], "layers": []}
    (tmp_path / RESOLVED_NAME).write_text("num_layers: [", encoding="utf-8")
    assert plots.curve_names(tmp_path) == {"sources": [], "layers": []}


def drawing_recorder(run_dir: Path) -> Recorder:
    return Recorder(run_dir, 60, {"plots": lambda: Plots(run_dir)})


@pytest.mark.slow
def test_only_the_end_waits_for_a_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]) -> None:
    drawings, is_drawn = list[list[str]](), threading.Event()
    run = subprocess.run

    def slow(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        drawings.append(command)
        assert is_drawn.wait(30)
        return run(command, **more)

    monkeypatch.setattr(subprocess, "run", slow)
    monkeypatch.setattr(step_metrics, "_PAUSE_SECONDS", 0)
    write_run(tmp_path / "run")
    folder = tmp_path / "run" / "plots"
    folder.mkdir()
    (folder / "loss.png.77.partial").touch()  # a drawing that was killed
    recorder = drawing_recorder(tmp_path / "run")
    for step in (60, 61, 62):
        recorder.record({"step": step, "tokens": 60_000, "valid_loss": 2.0, "valid_bits_per_byte": 1.4})
    is_drawn.set()
    recorder.close()
    assert [command[-1] for command in drawings] == ["19", "0"], "more than one at once, or at the wrong priority"
    assert not messages and (folder / "overview.png").exists()
    assert all(path.suffix == ".png" for path in folder.iterdir())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("_PLOTS_MODULE", "zerokara.no_such_module", "no_such_module"), ("_DRAWING_SECONDS", 0.01, "0.01 seconds")],
)
def test_a_drawing_that_fails_or_hangs_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str], name: str, value: object, message: str
) -> None:
    monkeypatch.setattr(step_metrics, name, value)
    recorder = drawing_recorder(tmp_path)
    recorder.record({"step": 1, "tokens": 1, "valid_loss": 2.0})
    recorder.close()
    (logged,) = messages
    assert logged.startswith("plots: ") and message in logged
