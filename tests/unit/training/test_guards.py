"""Guards of the weights: which steps are skipped, when a run is given up, and which processes have diverged."""

import math

import pytest
import torch
from drawn_models import build
from shapes import shape_of

from zerokara.config.engine import MonitoringSettings
from zerokara.model import parallel
from zerokara.training.guards import (
    FEWEST_STEPS,
    WINDOW_STEPS,
    DivergenceCheck,
    MustEnd,
    StepGuard,
    checksum,
)

NORM = "decoder.final_layernorm.weight"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_skipped(number: float) -> None:
    guard = StepGuard(MonitoringSettings(spike_sigmas=0, max_skipped_steps=3))
    assert str(number) in guard.skip_reason_of_loss(number)
    assert not guard.skip_reason_of_loss(1e9)  # spike_sigmas is 0


def test_a_loss_spike_is_measured_against_the_last_good_losses() -> None:
    guard = StepGuard(MonitoringSettings(spike_sigmas=3, max_skipped_steps=3))
    for number in range(FEWEST_STEPS):
        assert not guard.skip_reason_of_loss(100.0)  # too few to judge by
        guard.note(2.0 if number % 2 else 4.0, "")  # mean 3, standard deviation 1
    assert not guard.skip_reason_of_loss(5.9) and not guard.skip_reason_of_loss(-50.0)
    reason = guard.skip_reason_of_loss(6.5)
    assert "spike" in reason and "3.5 standard deviations" in reason and "spike_sigmas is 3" in reason
    guard.note(6.5, reason)
    assert guard.skip_reason_of_loss(6.5) == reason  # a skipped loss is no measure
    for _ in range(WINDOW_STEPS):
        guard.note(8.0, "")
    assert guard.recent_losses == (8.0,) * WINDOW_STEPS
    assert not guard.skip_reason_of_loss(8.0) and "spike" in guard.skip_reason_of_loss(8.001)


def test_one_skipped_step_too_many_in_a_row_gives_up() -> None:
    guard = StepGuard(MonitoringSettings(spike_sigmas=0, max_skipped_steps=2))
    for step in (1, 2, 3, 4, 5):
        skip_reason = "" if step == 3 else "the loss is nan"
        guard.note(3.0, skip_reason)
        guard.check_skipped_in_row(step, skip_reason)
    assert (guard.skipped_steps, guard.skipped_in_row) == (4, 2)
    guard.note(math.nan, "the loss is nan")
    with pytest.raises(MustEnd, match=r"step 6: .* 3 .*max_skipped_steps is 2.*lr="):
        guard.check_skipped_in_row(6, "the loss is nan")


def test_copies_of_tensor_parallel_processes_may_not_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel.start_alone()
    check = DivergenceCheck(build(shape_of(100, num_layers=1, hidden_size=16), torch.float32), step=20)
    changed = dict[int, torch.Tensor]()

    def all_gather(into: list[torch.Tensor], own: torch.Tensor) -> None:
        for rank, sums in enumerate(into):
            sums.copy_(own + changed.get(rank, 0))

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(parallel, "tensor_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    one = torch.arange(len(check._copies)) == list(check._copies).index(NORM)
    changed |= {0: one, 1: one}  # another data rank's sums do not matter
    check.check(30)
    changed.pop(1)
    check.check(30)  # equal already
    with pytest.raises(MustEnd, match=f"steps 31 to 40: .* {NORM}: "):
        check.check(40)


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


def test_parts_of_weights_are_compared_where_each_process_holds_one() -> None:
    """Under ZeRO 3 a parameter itself is empty."""
    parallel.start_alone()
    model = build(shape_of(100, num_layers=1, hidden_size=16), torch.float32)
    norm = dict(model.named_parameters())[NORM]
    whole, norm.data = norm.data.clone(), torch.empty(0)
    norm.ds_numel, norm.ds_tensor = len(whole), torch.cat([whole, torch.ones(3)])  # padding, which may be anything
    found, check = list[torch.Tensor](), DivergenceCheck(model, step=20)

    def all_gather(into: list[torch.Tensor], own: torch.Tensor) -> None:
        found.append(own)
        for each in into:
            each.copy_(own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "tensor_size", lambda: 2)
        patch.setattr(torch.distributed, "get_world_size", lambda: 2)
        patch.setattr(torch.distributed, "all_gather", all_gather)
        check.check(30)
        norm.ds_tensor[-3:] = 7
        check.check(40)
        norm.ds_tensor += 1
        check.check(50)
    assert found[0].tolist() == found[1].tolist() != found[2].tolist()
