"""What rounding explains, by which other tests are judged, and the settings that choose kernels."""

import pytest
import rounding
import torch
from numerics import kernels


def test_each_step_has_its_own_tolerance() -> None:
    expected = [4.0] * 20
    late = [*expected[:19], 4.0 + 0.9 * rounding.tolerance(4.0, step=20)]
    assert rounding.times_tolerance(late, expected) == pytest.approx(0.9)
    assert rounding.times_tolerance(late[::-1], expected) == pytest.approx(18)
    with pytest.raises(AssertionError, match="18 times what rounding explains"):
        rounding.assert_same_curve(late[::-1], expected)
    assert rounding.shares.pop() == pytest.approx(18)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_is_never_the_same(wrong: float) -> None:
    assert rounding.times_tolerance([1.0, wrong], [1.0, 1.0]) == float("inf")
    assert rounding.times_tolerance([1.0, 1.0], [1.0, wrong]) == float("inf")
    with pytest.raises(AssertionError):
        rounding.times_tolerance([1.0], [1.0, 1.0])


def test_tensors_and_weights_are_measured_by_the_largest_and_by_all() -> None:
    large = torch.tensor([1000.0, 0.001])
    one_off = torch.tensor([1000.0, 0.002])
    assert rounding.tensor_times_tolerance(one_off, large) < 0.1
    assert rounding.tensor_times_tolerance(one_off[1:], large[1:]) > rounding.BROKEN
    model = {"matrix": torch.ones(100, 100), "bias": torch.zeros(10)}
    moved = {**model, "bias": torch.full((10,), 1e-4)}  # beside weights of 1
    assert 0 < rounding.weights_times_tolerance(moved, model, at_step=20) < 0.5
    assert rounding.weights_times_tolerance(moved, model, at_step=1) > 1
    with pytest.raises(AssertionError):
        rounding.assert_same_weights({"matrix": model["matrix"]}, model, at_step=1)


def test_only_the_setting_chooses_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx512")
    monkeypatch.setenv("HOME", "/here")
    assert "ATEN_CPU_CAPABILITY" not in kernels.environment("threads_2")
    assert kernels.environment("oldest")["ATEN_CPU_CAPABILITY"] == "default"
    assert kernels.environment("as_it_is")["HOME"] == "/here"
    assert all((kernels.ROOT / path).exists() for path in kernels.TESTS)
    with pytest.raises(SystemExit) as caught:
        kernels.main(["--only", "threads_3"])
    assert caught.value.code == 2
