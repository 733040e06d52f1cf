"""Initial weights depend on the seed and the parameter's name, and are distributed as megatron-core's."""

import math
from typing import Any

import pytest
import torch
from drawn_models import build
from shapes import named, shape_of

from zerokara.model import builder
from zerokara.model.shapes import ModelShape, parts_of

SMALL = {"num_layers": 3, "hidden_size": 96, "num_attn_heads": 6, "seq_len": 64, "init_std": 0.05}
T5 = {**SMALL, "architecture": "t5", "ffn_hidden_size": 256}
FAMILIES: list[dict[str, Any]] = [{"num_kv_heads": 2, "tie_word_embeddings": False}, {"architecture": "gpt2"}]


def weights(shape: ModelShape, seed: int = 3) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in build(shape, seed=seed).named_parameters()}


def test_they_depend_on_the_seed_and_the_name_alone() -> None:
    one, again, other = (weights(shape_of(**SMALL), seed) for seed in (3, 3, 4))
    deeper = weights(shape_of(**{**SMALL, "num_layers": 4}, tie_word_embeddings=False))
    for name, weight in one.items():
        assert torch.equal(again[name], weight)
        if "linear_fc2" not in name and "linear_proj" not in name:  # their spread depends on the number of layers
            assert torch.equal(deeper[name], weight), name
        assert torch.equal(other[name], weight) is name.endswith("layernorm.weight")
    layers = [one[f"decoder.layers.{layer}.mlp.linear_fc1.weight"] for layer in range(2)]
    assert not torch.equal(*layers)
    assert torch.corrcoef(torch.stack([layer.flatten() for layer in layers]))[0, 1].abs() < 0.02


@pytest.mark.parametrize("overrides", FAMILIES, ids=named)
def test_the_distribution_is_that_of_megatron_core(overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(**SMALL, **overrides)
    ours = weights(shape)
    config = builder.TransformerConfig
    monkeypatch.setattr(
        builder, "TransformerConfig", lambda **given: config(**{**given, "perform_initialization": True})
    )
    theirs = {name: parameter.detach() for name, parameter in build(shape, seed=None).named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        real = shape.vocab_size if name.endswith(("word_embeddings.weight", "output_layer.weight")) else None
        assert not weight[real:].any() or real is None, f"{name}: padding rows are zero"
        # 5,000 numbers or more: the spread of a sample is right to 1/√(2n) = 1 %.
        assert weight[:real].std().item() == pytest.approx(theirs[name][:real].std().item(), rel=0.05, abs=1e-9), name
        assert weight[:real].mean().item() == pytest.approx(theirs[name][:real].mean().item(), abs=0.002), name
        assert not torch.equal(weight, theirs[name]) or weight.dim() == 1


@pytest.mark.parametrize(
    ("overrides", "embedding", "queries", "residual"),
    [
        ({}, 0.02, 0.02 / math.sqrt(16), 0.02 / math.sqrt(6)),
        ({"optimizer": "adafactor"}, 1.0, 96**-0.5 / math.sqrt(16), 256**-0.5),
    ],
    ids=["auto", "T5's rule"],
)
def test_an_encoder_decoder(overrides: dict[str, Any], embedding: float, queries: float, residual: float) -> None:
    """With Adafactor by fan-in, as transformers' T5; small queries in place of scores scaled by 1 / √head_dim."""
    shape = shape_of(**{**T5, "init_std": "auto", **overrides})
    drawn = weights(shape)
    name = "encoder.layers.0.self_attention.linear_qkv.weight"
    of_queries, of_keys, _ = parts_of(drawn[name], name, shape)
    spreads = {
        "embedding": (drawn["embedding.word_embeddings.weight"][:300], embedding),
        "queries": (of_queries, queries),
        "keys": (of_keys, queries * math.sqrt(16)),
        "of the cross-attention": (drawn["decoder.layers.1.cross_attention.linear_q.weight"], queries),
        "residual": (drawn["decoder.layers.1.mlp.linear_fc2.weight"], residual),
    }
    for name, (weight, std) in spreads.items():
        assert weight.std().item() == pytest.approx(std, rel=0.05), name
