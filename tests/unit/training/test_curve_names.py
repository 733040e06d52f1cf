"""Names of the curves of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configs import config_of

from zerokara.config.pretrain_config import RESOLVED_NAME
from zerokara.config.rendering import as_yaml
from zerokara.training.monitoring import curve_names


def names_of(run_dir: Path, **settings: Any) -> curve_names.CurveNames:
    (run_dir / RESOLVED_NAME).write_text(as_yaml(config_of(**settings)), encoding="utf-8")
    return curve_names.of_run(run_dir)


def test_a_source_is_called_by_its_file_or_folder(tmp_path: Path) -> None:
    entries = (
        "data/ko/reviews.jsonl.gz",
        "/laws.txt",
        "hf://datasets/owner/books@v1",
        "@all.txt",
        "data/*.parquet",
        "a.ndjson.zst",
    )
    names = names_of(tmp_path, input_jsonl=entries)
    assert names.sources == ("reviews", "laws", "books@v1", "all", "*", "a")
    long = names_of(tmp_path, input_jsonl=("x" * 40 + ".jsonl",))
    assert long.source(0) == "x" * 27 + "…" and long.source(1) == "source 2"


def test_sources_of_one_name_are_told_apart(tmp_path: Path) -> None:
    names = names_of(tmp_path, input_jsonl=("a/text.jsonl", "b/text.jsonl.zst", "c/other.txt"))
    assert names.sources == ("source 1 text", "source 2 text", "other")


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"architecture": "qwen3_moe", "num_layers": 6, "moe_layers": (1, 3, 5)}, ("layer 1", "layer 3", "layer 5")),
        ({"architecture": "switch", "num_layers": 2}, ("encoder layer 1", "decoder layer 1")),
        ({"architecture": "llama"}, ()),
    ],
)
def test_a_layer_with_experts_has_its_number(tmp_path: Path, settings: dict[str, Any], layers: tuple[str, ...]) -> None:
    names = names_of(tmp_path, **settings)
    assert names.moe_layers == layers and names.moe_layer(7) == "MoE layer 8"


def test_a_configuration_that_cannot_be_read_stops_no_picture(tmp_path: Path) -> None:
    assert curve_names.of_run(tmp_path) == curve_names.CurveNames()
    (tmp_path / RESOLVED_NAME).write_text("num_layers: [", encoding="utf-8")
    assert curve_names.of_run(tmp_path) == curve_names.CurveNames()
