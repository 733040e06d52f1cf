"""Initial weights belong to the seed and the parameter's name, and are distributed as megatron-core draws them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import initial_weights, megatron, parallel
from zerokara.model.megatron import build
from zerokara.model.shapes import ModelShape
from zerokara.model.sharding import Sharding

SMALL = ["num_layers=3", "hidden_size=96", "num_attn_heads=6", "seq_len=64", "init_std=0.05"]
FAMILIES = [("num_kv_heads=2",), ("tie_word_embeddings=false",), ("architecture=gpt2",)]


@pytest.fixture(autouse=True, scope="module")
def _groups() -> None:
    parallel.start_alone()


def shape_of(*overrides: str) -> ModelShape:
    return ModelShape.from_config(load(PretrainConfig, "/dev/null", [*SMALL, *overrides]), 300)


def weights(shape: ModelShape, seed: int = 3) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in build(shape, seed=seed).named_parameters()}


def test_they_belong_to_the_seed_and_the_name() -> None:
    one, again, other = weights(shape_of()), weights(shape_of()), weights(shape_of(), seed=4)
    deeper = weights(shape_of("num_layers=4", "tie_word_embeddings=false"))
    for name, weight in one.items():
        assert torch.equal(again[name], weight)
        if "linear_fc2" not in name and "linear_proj" not in name:  # their spread goes by the number of layers
            assert torch.equal(deeper[name], weight), name
        assert torch.equal(other[name], weight) is name.endswith("layernorm.weight")
    layers = [one[f"decoder.layers.{layer}.mlp.linear_fc1.weight"] for layer in range(2)]
    assert not torch.equal(*layers)
    assert torch.corrcoef(torch.stack([layer.flatten() for layer in layers]))[0, 1].abs() < 0.02


@pytest.mark.parametrize("overrides", FAMILIES)
def test_each_process_has_its_part_of_the_whole(overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(*overrides)
    whole, sharding = weights(shape), Sharding.of(shape)
    for rank in range(2):
        part = build(shape, seed=None)
        for name, parameter in part.named_parameters():
            parameter.data = torch.full_like(sharding.local(name, whole[name], rank, 2), math.nan)
        with monkeypatch.context() as patch:
            patch.setattr(parallel, "tensor_rank", lambda rank=rank: rank)
            patch.setattr(parallel, "tensor_size", lambda: 2)
            initial_weights.draw(part, shape, seed=3)
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, sharding.local(name, whole[name], rank, 2)), name


@pytest.mark.parametrize("overrides", FAMILIES)
def test_they_are_distributed_as_megatron_cores(overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(*overrides)
    ours = weights(shape)
    family = megatron._FAMILIES[shape.architecture]
    drawing = {shape.architecture: lambda s: dataclasses.replace(family(s), perform_initialization=True)}
    monkeypatch.setattr(megatron, "_FAMILIES", drawing)
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
    ("overrides", "embedding", "queries", "added"),
    [
        ((), 0.02, 0.02 / math.sqrt(16), 0.02 / math.sqrt(6)),
        (("init_std=0.1",), 0.1, 0.1 / math.sqrt(16), 0.1 / math.sqrt(6)),
        (("optimizer=adafactor",), 1.0, 96**-0.5 / math.sqrt(16), 256**-0.5),
    ],
    ids=["auto", "a number", "as T5"],
)
def test_with_an_encoder(overrides: tuple[str, ...], embedding: float, queries: float, added: float) -> None:
    """With Adafactor by the widths, as transformers' T5; queries in place of the scores' division by √head_dim."""
    shape = shape_of("architecture=t5", "num_kv_heads=auto", "init_std=auto", "ffn_hidden_size=256", *overrides)
    drawn = weights(shape)
    rows, keys, _ = initial_weights.row_blocks("encoder.layers.0.self_attention.linear_qkv.weight", shape)
    together = drawn["encoder.layers.0.self_attention.linear_qkv.weight"]
    spreads = {
        "embedding": (drawn["embedding.word_embeddings.weight"][:300], embedding),
        "queries": (together[rows], queries),
        "keys": (together[keys], queries * math.sqrt(16)),
        "of the cross attention": (drawn["decoder.layers.1.cross_attention.linear_q.weight"], queries),
        "added": (drawn["decoder.layers.1.mlp.linear_fc2.weight"], added),
    }
    for name, (weight, std) in spreads.items():
        assert weight.std().item() == pytest.approx(std, rel=0.05), name
