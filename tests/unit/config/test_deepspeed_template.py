"""DeepSpeed's template: what acts is passed on as it stands, all else is refused with its place before a start."""

from pathlib import Path

import pytest
from configs import refused

from zerokara.config.deepspeed_template import ZeroKeys, load_template


def written(folder: Path, text: str) -> str:
    (folder / "template.json").write_text(text, encoding="utf-8")
    return str(folder / "template.json")


def zero(text: str) -> str:
    return f'{{\n\t"zero_optimization": {{\n\t\t{text}\n\t}}\n}}\n'


def test_what_is_given_is_passed_on_and_nothing_else(tmp_path: Path) -> None:
    path = written(tmp_path, zero('"overlap_comm": true, "reduce_bucket_size": 5e8'))
    assert load_template(path) == {"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 500_000_000}}
    assert load_template(written(tmp_path, "{}")) == {}
    assert load_template("auto")["zero_optimization"].keys() >= {"reduce_bucket_size", "allgather_bucket_size"}


@pytest.mark.parametrize(
    ("text", "line", "key", "said"),
    [
        (zero('"stage": 3'), 3, "zero_optimization.stage", "config.yaml"),
        (zero('"offload_param": {"device": "cpu"}'), 3, "zero_optimization.offload_param.device", "config.yaml"),
        (zero('"offload_param": "cpu"'), 3, "zero_optimization.offload_param", "a mapping"),
        (zero('"reduce_bucket_size": "auto"'), 3, "zero_optimization.reduce_bucket_size", "whole number"),
        (zero('"reduce_bucket_size": 1e14'), 3, "zero_optimization.reduce_bucket_size", "2000000000"),
        (zero('"reduce_bucket_sizes": 1'), 3, "zero_optimization.reduce_bucket_sizes", "reduce_bucket_size?"),
        (zero('"zero_quantized_weights": true'), 3, "zero_optimization.zero_quantized_weights", "number of GPUs"),
        (zero('"overlap_comm": true')[:-2], 5, None, "is not JSON"),
        ('{"flops_profiler": {"enabled": true}}', 1, "flops_profiler", "mislead"),
        ('{"zero_optimisation": {}}', 1, "zero_optimisation", "zero_optimization?"),
        ('{\n"bf16": true}', 2, "bf16", "config.yaml"),
        ('{"optimizer": {"type": "Adam"}}', 1, "optimizer", "config.yaml sets optimizer"),
        ('{"optimizer": {"type": "Adam"}}', 1, "optimizer", "remove it here"),
        (zero('"stage": 2'), 3, "zero_optimization.stage", "remove it here"),
        ('{"wall_clock_breakdown": NaN}', 1, "wall_clock_breakdown", "true or false"),
        ("[1]", 1, None, "key: value"),
    ],
)
def test_all_else_is_refused_with_its_line(tmp_path: Path, text: str, line: int, key: str | None, said: str) -> None:
    path = written(tmp_path, text)
    (fault,) = refused(load_template, path)
    assert (fault.where, fault.key) == (f"{path}:{line}", key) and said in f"{fault.rule}; {fault.remedy}"


def test_every_key_is_one_of_deepspeeds() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    theirs = {info.alias or name for name, info in DeepSpeedZeroConfig.model_fields.items()}
    assert {*ZeroKeys.model_fields} <= theirs
