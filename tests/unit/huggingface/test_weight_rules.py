"""The weight rules: the order of a table, and every offender listed.

tests/numerics/test_export_logits.py proves all transforms to HF, test_from_hf.py that they come back.
"""

import pytest

from zerokara.errors import RunError
from zerokara.huggingface import weight_rules
from zerokara.huggingface.weight_rules import WeightRule
from zerokara.model.shapes import ModelShape

# 4 heads and 2 kv heads of width 1: every row of linear_qkv is one head.
TINY = ModelShape("llama", 2, 4, 4, 2, 3, 8, 5, True, 1e4, 1e-5, 0.02)


def test_layers_and_experts_are_written_out_in_order() -> None:
    table = (
        WeightRule("a", ("A",)),
        WeightRule("l.{i}.d", ("L.{i}.d",), layers="dense"),
        WeightRule("l.{i}.x", ("L.{i}.{e}.g", "L.{i}.{e}.u"), layers="sparse"),
        WeightRule("l.{i}.n", ("L.{i}.n",)),
        WeightRule("z", ("Z",)),
    )
    found = weight_rules.expand(table, 2, moe_layers=[1], num_experts=2)
    assert [rule.ours for rule in found] == ["a", "l.0.d", "l.0.n", "l.1.x", "l.1.n", "z"]
    assert found[1].hf == ("L.0.d",) and found[3].hf == ("L.1.0.g", "L.1.1.g", "L.1.0.u", "L.1.1.u")


def test_all_offenders_are_listed_at_once() -> None:
    table = [
        WeightRule(*each) for each in (("a", ("A",)), ("b", ("B",)), ("gone", ("C",)), ("d", ("A",)), ("e", ("E",)))
    ]
    table.append(WeightRule("fc", ("gate", "up"), weight_rules.GATE_AND_UP))
    ours = {"a": (2,), "b": (2, 2), "surplus": (1,), "d": (2,), "e": (1,), "fc": (4, 2)}
    hf = {"A": (2,), "B": (3, 2), "C": (1,), "unfilled": (1,), "gate": (2, 2), "up": (2, 3)}
    with pytest.raises(RunError) as caught:
        weight_rules.check(table, ours, hf, TINY)
    offenders = [line.strip() for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert sorted(line.partition(":")[0] for line in offenders) == [
        "A", "E", "b", "gate, up", "gone", "surplus", "unfilled",
    ]  # fmt: skip
    (shapes,) = (line for line in offenders if line.startswith("b:"))
    assert "[2, 2]" in shapes and "[3, 2]" in shapes
