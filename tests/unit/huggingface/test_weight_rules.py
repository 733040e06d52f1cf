"""The weight rules: every offender is listed.

tests/numerics/test_export_logits.py proves all transforms to HF, test_from_hf.py that they come back.
"""

from dataclasses import replace

import pytest

from zerokara.base.errors import RunError
from zerokara.huggingface import families, weight_rules
from zerokara.model.shapes import ModelShape

# 4 heads and 2 kv heads of width 1: every row of linear_qkv is one head.
TINY = ModelShape("llama", 2, 4, 4, 2, 3, 8, 5, True, 1e4, 1e-5, 0.02)


def test_all_offenders_are_listed_at_once() -> None:
    rules = families.rules_for(TINY)
    made = dict(weight_rules.check(rules, TINY.parameter_shapes(), TINY))
    assert not weight_rules.offenders(rules, made, TINY)
    layer = "model.layers.1."
    del made[layer + "self_attn.q_proj.weight"]
    wrong = {layer + "mlp.up_proj.weight": (3, 5), layer + "self_attn.k_proj.weight": (4, 4), "surplus": (1,)}
    rules[-1] = replace(rules[-1], hf=rules[0].hf)  # the last norm: its own tensor is left over, the embedding is two
    offenders = weight_rules.offenders(rules, made | wrong, TINY)
    assert sorted({line.partition(":")[0] for line in offenders}) == sorted(
        [*wrong, layer + "self_attn.q_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
    )
    (shapes,) = (line for line in offenders if line.startswith(layer + "mlp.up_proj.weight"))
    assert "[3, 5]" in shapes and "[3, 4]" in shapes


def test_heads_that_cannot_share_are_an_offender() -> None:
    assert len(weight_rules.offenders(families.rules_for(TINY), {}, replace(TINY, num_kv_heads=3))) == 1


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
