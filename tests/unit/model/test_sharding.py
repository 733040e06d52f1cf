"""Tensor-parallel sharding: both directions.

Which rows a rank holds, trainings tell that equal one process (tests/numerics).
"""

from typing import Any

import pytest
import torch
from drawn_models import build
from shapes import named, shape_of

from zerokara.model import parallel
from zerokara.model.shapes import local_sizes

SMALL = {"num_attn_heads": 8, "tie_word_embeddings": False}
FAMILIES = [
    {**SMALL, "num_kv_heads": 4},
    {**SMALL, "architecture": "gpt2"},
    {**SMALL, "architecture": "t5"},
    {**SMALL, "architecture": "mixtral", "num_kv_heads": 4},
]


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def fill(empty: list[torch.Tensor], shards: list[torch.Tensor]) -> None:
    """Do what `all_gather` does on each rank."""
    for place, shard in zip(empty, shards, strict=True):
        place.copy_(shard)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("overrides", FAMILIES, ids=named)
def test_shards_make_the_whole_again(overrides: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(**overrides)
    num_local, parameters = 0, dict(build(shape, seed=None).named_parameters())
    monkeypatch.setattr(parallel, "tensor_size", lambda: size)
    for name, parameter in parameters.items():
        whole, partition, shards = numbered(*parameter.shape), shape.partition(name), list[torch.Tensor]()
        for rank in range(size):
            monkeypatch.setattr(parallel, "tensor_rank", lambda rank=rank: rank)
            shards.append(parallel.local_shard(whole, partition))
        monkeypatch.setattr(torch.distributed, "all_gather", lambda out, *_, made=shards, **__: fill(out, made))
        assert torch.equal(parallel.gathered(shards[-1], partition), whole)
        num_local += shards[0].numel()
        numbers = torch.cat([shard.flatten() for shard in shards]).sort().values
        # By the mark on a parameter DeepSpeed counts a replicated one once.
        is_replicated = partition is None
        assert parameter.tensor_model_parallel is not is_replicated, name
        if is_replicated:
            assert all(torch.equal(shard, whole) for shard in shards)
        else:
            assert torch.equal(numbers, whole.flatten()), f"{name}: each number has one holder"
    assert sum(local_sizes(shape, size).values()) == num_local
