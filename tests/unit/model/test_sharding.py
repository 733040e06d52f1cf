"""Tensor-parallel sharding: both directions, and that the table knows every parameter there is."""

from typing import Any

import pytest
import torch
from shapes import named, shape_of

from zerokara.model.builder import build
from zerokara.model.parallel import Sharding
from zerokara.model.shapes import Partition, local_sizes

SMALL = {"num_attn_heads": 8, "tie_word_embeddings": False}
FAMILIES = [
    {**SMALL, "num_kv_heads": 4},
    {**SMALL, "architecture": "gpt2"},
    {**SMALL, "architecture": "t5"},
    {**SMALL, "architecture": "mixtral", "num_kv_heads": 4},
]


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("overrides", FAMILIES, ids=named)
def test_shards_make_the_whole_again(overrides: dict[str, Any], size: int) -> None:
    shape = shape_of(**overrides)
    sharding = Sharding(shape.traits.gated)
    num_local = 0
    for name, parameter in build(shape, seed=None).named_parameters():
        whole = numbered(*parameter.shape)
        shards = [sharding.local(name, whole, rank, size) for rank in range(size)]
        assert torch.equal(sharding.whole(name, shards), whole)
        assert sharding.whole_shape(name, shards[0].shape, size) == whole.shape
        num_local += shards[0].numel()
        numbers = torch.cat([shard.flatten() for shard in shards]).sort().values
        # By the mark on a parameter DeepSpeed counts a replicated one once.
        assert parameter.tensor_model_parallel is not sharding.is_replicated(name), name
        if sharding.is_replicated(name):
            assert all(torch.equal(shard, whole) for shard in shards)
        else:
            assert torch.equal(numbers, whole.flatten()), f"{name}: each number has one holder"
    assert sum(local_sizes(shape, size).values()) == num_local


def test_shards_by_hand() -> None:
    gated, plain = Sharding(gated=True), Sharding(gated=False)
    rows = numbered(4, 2)  # of a gated one: two of the gate, two of up
    assert gated.local("decoder.layers.0.mlp.linear_fc1.weight", rows, 1, 2).tolist() == [[2, 3], [6, 7]]
    assert plain.local("decoder.layers.0.mlp.linear_fc1.weight", rows, 1, 2).tolist() == [[4, 5], [6, 7]]
    assert plain.local("decoder.layers.0.mlp.linear_fc1.bias", rows[:, 0], 1, 2).tolist() == [4, 6]
    assert gated.local("decoder.layers.0.mlp.linear_fc2.weight", rows, 1, 2).tolist() == [[1], [3], [5], [7]]
    assert gated.local("embedding.word_embeddings.weight", rows, 1, 2).tolist() == [[4, 5], [6, 7]]
    # Two kv heads of two queries each, size 1: q q k v, q q k v. Each rank has one kv head, whole.
    heads = numbered(8, 1)
    second = gated.local("decoder.layers.0.self_attention.linear_qkv.weight", heads, 1, 2)
    assert second.flatten().tolist() == [4, 5, 6, 7]
    assert gated.partition("decoder.layers.0.self_attention.linear_proj.bias") is Partition.REPLICATED


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(KeyError, match="gate"):
        Sharding(gated=True).partition("decoder.layers.0.mlp.gate.weight")
