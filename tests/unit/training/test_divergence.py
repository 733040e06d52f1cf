"""What the processes compare: every bit of every weight, and who differs from whom since when."""

from __future__ import annotations

import pytest
import torch

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import parallel
from zerokara.model.builder import build
from zerokara.model.shapes import ModelShape
from zerokara.training.guards import DivergenceCheck, ProcessesDiverged, checksum

SMALL = ["num_layers=1", "hidden_size=16", "num_attn_heads=2", "seq_len=8"]
MATRIX, NORM = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.final_layernorm.weight"


@pytest.fixture
def check() -> DivergenceCheck:
    parallel.start_alone()
    shape = ModelShape.from_config(load(PretrainConfig, "/dev/null", SMALL), 100)
    return DivergenceCheck(build(shape, torch.float32), step=20)


def pretend(
    patch: pytest.MonkeyPatch, check: DivergenceCheck, changes: dict[int, str], processes: int = 4, tensor_size: int = 1
) -> None:
    """Let the other processes hold what this one holds, but for one element of a parameter in each of `changes`."""

    def all_gather(into: list[torch.Tensor], own: torch.Tensor) -> None:
        for rank, sums in enumerate(into):
            sums.copy_(own)
            if rank in changes:
                sums[list(check._parameters).index(changes[rank])] += 2

    patch.setattr(torch.distributed, "get_world_size", lambda: processes)
    patch.setattr(parallel, "tensor_size", lambda: tensor_size)
    patch.setattr(torch.distributed, "all_gather", all_gather)


def test_who_differs_since_when_is_named(monkeypatch: pytest.MonkeyPatch, check: DivergenceCheck) -> None:
    with torch.no_grad():
        check._parameters[NORM][3] = float("nan")  # bits are compared, not numbers
    pretend(monkeypatch, check, {})
    check.check(30)
    pretend(monkeypatch, check, {2: MATRIX})
    check.check(30)  # equal already
    with pytest.raises(ProcessesDiverged, match=f"steps 31 to 40: processes 0, 1, 3 and process 2 .* {MATRIX}: "):
        check.check(40)


def test_tensor_parallel_shards_may_differ_and_replicas_may_not(
    monkeypatch: pytest.MonkeyPatch, check: DivergenceCheck
) -> None:
    pretend(monkeypatch, check, {1: MATRIX, 3: MATRIX}, tensor_size=2)
    check.check(21)
    pretend(monkeypatch, check, {1: MATRIX, 2: MATRIX}, tensor_size=2)
    with pytest.raises(ProcessesDiverged, match="process 0 and process 2 hold"):
        check.check(22)
    pretend(monkeypatch, check, {1: NORM, 3: NORM}, tensor_size=2)
    with pytest.raises(ProcessesDiverged, match="processes 0, 2 and processes 1, 3 hold"):
        check.check(22)


def test_one_process_asks_nobody(monkeypatch: pytest.MonkeyPatch, check: DivergenceCheck) -> None:
    monkeypatch.setattr(torch.distributed, "all_gather", lambda *_, **__: pytest.fail("asked"))
    check.check(21)


@pytest.mark.parametrize(("dtype", "integers"), [(torch.float32, torch.int32), (torch.bfloat16, torch.int16)])
def test_one_changed_bit_changes_the_checksum(dtype: torch.dtype, integers: torch.dtype) -> None:
    for shape in ((7,), (5, 9), (3, 4, 5)):
        weights = torch.randn(shape).to(dtype)
        before, bits = int(checksum(weights)), weights.view(integers).view(-1)
        for place in range(len(bits)):
            bits[place] ^= 1 << (place % 14)
            assert int(checksum(weights)) != before
            bits[place] ^= 1 << (place % 14)
        swapped = weights.flip(0)
        assert int(checksum(weights)) == before != int(checksum(swapped))
    assert int(checksum(torch.empty(0, dtype=dtype))) == 0, "ZeRO 3 leaves nothing of a partitioned parameter"
