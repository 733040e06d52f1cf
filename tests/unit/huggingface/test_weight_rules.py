"""The weight rules: every offender is listed.

tests/numerics/test_export_logits.py proves all transforms to HF, test_from_hf.py that they come back.
"""

import pytest

from zerokara.base.errors import RunError
from zerokara.huggingface import families, weight_rules
from zerokara.huggingface.weight_rules import WeightRule
from zerokara.model.shapes import ModelShape

# 4 heads and 2 kv heads of width 1: every row of linear_qkv is one head.
TINY = ModelShape("llama", 2, 4, 4, 2, 3, 8, 5, True, 1e4, 1e-5, 0.02)


def test_all_offenders_are_listed_at_once() -> None:
    table = [
        WeightRule(*each) for each in (("a", ("A",)), ("b", ("B",)), ("gone", ("C",)), ("d", ("A",)), ("e", ("E",)))
    ]
    table.append(WeightRule("fc", ("gate", "up"), weight_rules.GATE_AND_UP))
    ours = {"a": (2,), "b": (2, 2), "surplus": (1,), "d": (2,), "e": (1,), "fc": (4, 2)}
    hf = {"A": (2,), "B": (3, 2), "C": (1,), "unfilled": (1,), "gate": (2, 2), "up": (2, 3)}
    offenders = weight_rules.offenders(table, ours, hf, TINY)
    assert sorted(line.partition(":")[0] for line in offenders) == [
        "A", "E", "b", "gate, up", "gone", "surplus", "unfilled",
    ]  # fmt: skip
    (shapes,) = (line for line in offenders if line.startswith("b:"))
    assert "[2, 2]" in shapes and "[3, 2]" in shapes


def test_other_weights_than_the_shapes_are_listed() -> None:
    rules, shapes = families.rules_for(TINY), TINY.parameter_shapes()
    norm, embedding = "decoder.final_layernorm.weight", "embedding.word_embeddings.weight"
    made = weight_rules.check(rules, shapes, TINY)
    assert list(made) == [name for rule in rules for name in rule.hf] and made["model.embed_tokens.weight"] == (5, 4)
    wrong = {name: size for name, size in shapes.items() if name != norm} | {"surplus": (1,), embedding: (5, 4)}
    with pytest.raises(RunError) as caught:
        weight_rules.check(rules, wrong, TINY)
    lines = sorted(line.strip() for line in str(caught.value).splitlines() if line.startswith("  "))
    assert [line.partition(":")[0] for line in lines] == [norm, embedding, "surplus"]
