"""What the processes compare after a step: every number in the end, bit for bit, and who differs from whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import parallel
from zerokara.model.builder import build
from zerokara.model.shapes import ModelShape
from zerokara.training.processes import divergence
from zerokara.training.processes.divergence import DivergenceCheck, ProcessesDiverged

SMALL = ["num_layers=1", "hidden_size=16", "num_attn_heads=2", "seq_len=8"]


class TwoProcesses:
    """A group of this process and one that differs from it in one number of the parameter `name`."""

    def __init__(self, watched: DivergenceCheck, name: str = "", place: int = 0, dtype: torch.dtype = torch.float32):
        self.other = {each: parameter.detach().clone() for each, parameter in watched._parameters.items()}
        if name:
            bits = self.other[name].view(-1).view(torch.int32 if dtype == torch.float32 else torch.int16)
            bits[place] ^= 1  # the last bit
        self._mine, self._watched = watched._parameters, watched

    def size(self) -> int:
        """Two."""
        return 2

    def _of_other(self, step: int) -> torch.Tensor:
        slices = [self._watched._slice(parameter, step)[1] for parameter in self.other.values()]
        return divergence._bits(torch.cat(slices))

    def install(self, patch: pytest.MonkeyPatch, step: int) -> None:
        """Answer the collectives as both processes together would."""

        def all_reduce(tensor: torch.Tensor, op: object = None, group: object = None) -> None:
            bits = self._of_other(step)
            tensor.copy_(torch.maximum(tensor, torch.stack([bits, ~bits])))

        def all_gather(into: list[torch.Tensor], mine: torch.Tensor, group: object = None) -> None:
            into[0].copy_(mine)
            into[1].copy_(self._of_other(step))

        patch.setattr(parallel, "data_size", lambda: 2)
        patch.setattr(parallel, "data_group", lambda: self)
        patch.setattr(torch.distributed, "all_reduce", all_reduce)
        patch.setattr(torch.distributed, "all_gather", all_gather)
        patch.setattr(divergence, "_first_of_all", lambda text, _: text)
        patch.setattr(torch.distributed, "get_process_group_ranks", lambda _: [0, 1])


def watched(dtype: torch.dtype = torch.float32) -> DivergenceCheck:
    parallel.start_alone()
    shape = ModelShape.from_config(load(PretrainConfig, "/dev/null", SMALL), 100)
    return DivergenceCheck(build(shape, dtype), seed=7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_is_found_in_time_and_named(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(divergence, "STEPS_TO_COMPARE_ALL", 10)
    mine, name, place = watched(dtype), "decoder.layers.0.mlp.linear_fc1.weight", 1234
    assert mine._parameters[name].numel() > 2000
    other = TwoProcesses(mine, name, place, dtype)
    found = []
    for step in range(1, 21):
        other.install(monkeypatch, step)
        try:
            mine.check(step)
            mine.confirm()
        except ProcessesDiverged as error:
            found.append((step, str(error)))
    steps = [step for step, _ in found]
    assert len(steps) == 2 and steps[1] - steps[0] == 10, "once in every ten steps"
    for fact in (f"step {steps[0]}:", "process 0 and process 1", f"{name} from element {place} "):
        assert fact in found[0][1]


def test_equal_processes_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = watched()
    with torch.no_grad():
        mine._parameters["decoder.final_layernorm.weight"][3] = float("nan")  # bits are compared, not numbers
    other = TwoProcesses(mine)
    for step in range(3):
        other.install(monkeypatch, step)
        mine.check(step)
    mine.confirm()


def test_a_difference_is_looked_at_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = watched()
    TwoProcesses(mine, "decoder.final_layernorm.weight").install(monkeypatch, 0)
    mine.check(0)
    with pytest.raises(ProcessesDiverged, match=r"step 0: .*decoder\.final_layernorm\.weight"):
        mine.check(1)


def test_one_process_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = watched()
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: pytest.fail("asked"))
    mine.check(1)


def test_parties_are_told_by_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda _: [1, 3, 5, 7])
    group: Any = None
    assert divergence._parties([4, 4, 9, 4], group) == "processes 1, 3, 7 and process 5"
