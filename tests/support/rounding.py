"""How far two right computations of the same numbers may lie apart: what rounding explains on any processor.

Two computations that are equal on paper (ours and Hugging Face's, one process and two, one micro batch and four) add
the same numbers up in different orders, and the order belongs to the machine: to the width of its vectors, to the
kernels that a library has for it, to the number of threads. So a tolerance cannot be a number that was right on one
machine. Here it counts roundings: the number format's spacing at the size of what is compared, times the steps so far.

    tolerance(magnitude, step) = ROUNDINGS[precision][quantity] × step × SPACING[precision] × magnitude

Why the steps: at step 1 the weights are equal, and the losses differ by the rounding of one forward pass. Every update
adds its own. Where a gradient is little more than rounding, Adam's ratio m / √v has no right digit, and that weight
takes another part of a step. These differences add up, at worst all in one direction.

What was seen under any kernels, what is allowed, and how far away a wrong computation is: docs/rounding.md. Where a
training is ill-conditioned, lower the rate of its test, or compare its steps while it learns; do not raise a tolerance.

Where machine, program and number of threads are the same, equal means equal bits: compare with ==, not with this
module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SPACING = {"fp32": 2.0**-23, "bf16": 2.0**-7}
"""Of 1 and the next number, in each format; of any other number, times its size."""

ROUNDINGS = {
    "fp32": {"loss": 8, "grad_norm": 256, "weight": 256, "tensor": 128},
    "bf16": {"loss": 1 / 128, "tensor": 4},
}
"""Of what is compared, a training step:

- loss: nats a token, a mean over the tokens of a step. In bf16 the mean itself is kept in fp32. What is rounded to bf16
  is what it is made from, at least 65,536 activations and weights, each by itself: the error of a mean of so many is
  1/256 of the error of one, and two such roundings are allowed.
- grad_norm: a gradient is a derivative, and feels a change of the weights by as much as the loss is curved.
- weight: the root mean square of a tensor's differences, beside that of all weights (which are fp32 in bf16 too).
- tensor: every number of logits or gradients, beside the largest of them; of one computation, so without steps.
"""

BROKEN = 100
"""What is wrong on purpose must exceed its tolerance so many times."""

shares: list[float] = []
"""Of its tolerance, what each comparison of the running test took. tests/conftest.py tells the largest."""


def tolerance(magnitude: float, step: int = 1, precision: str = "fp32", quantity: str = "loss") -> float:
    """The largest difference, at training step `step` (1 is the first), that rounding explains."""
    return ROUNDINGS[precision][quantity] * step * SPACING[precision] * abs(magnitude)


def times_tolerance(
    found: Sequence[float],
    expected: Sequence[float],
    *,
    at_step: int | None = None,
    precision: str = "fp32",
    quantity: str = "loss",
) -> float:
    """The largest difference of two curves, in tolerances; infinite where one is not a number.

    The values are of the steps 1, 2, 3 …, or all of `at_step`.
    """
    assert len(found) == len(expected) > 0, f"{len(found)} values beside {len(expected)}"
    return max(
        _share(abs(a - b), tolerance(b, at_step or number, precision, quantity))
        for number, (a, b) in enumerate(zip(found, expected, strict=True), start=1)
    )


def assert_same_curve(found: Sequence[float], expected: Sequence[float], **how: Any) -> None:
    """Assert that two curves differ by rounding alone; `how` as for `times_tolerance`."""
    share = times_tolerance(found, expected, **how)
    shares.append(share)
    assert share <= 1, (
        f"{how.get('quantity', 'loss')}: {share:.3g} times what rounding explains\n{list(found)}\n{list(expected)}"
    )


def assert_same_loss(found: float, expected: float, *, precision: str = "fp32") -> None:
    """Assert that two losses that were computed from equal weights differ by rounding alone."""
    assert_same_curve([found], [expected], precision=precision)


def weights_times_tolerance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], at_step: int) -> float:
    """The largest difference of two models' weights after `at_step` updates, in tolerances.

    The root mean square over each tensor counts, beside that of all weights. A single weight says little: where its
    gradient is rounding alone, Adam takes up to a whole step in either direction. So does a tensor's own size: Adam's
    steps do not know it, and that of the biases of keys, which no loss depends on, is made of such steps.
    """
    assert found.keys() == expected.keys()
    squares = sum(weight.double().square().sum().item() for weight in expected.values())
    size = (squares / sum(weight.numel() for weight in expected.values())) ** 0.5
    allowed = tolerance(size, at_step, quantity="weight")
    return max(
        _share((found[name].double() - weight.double()).square().mean().sqrt().item(), allowed)
        for name, weight in expected.items()
    )


def assert_same_weights(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], at_step: int) -> None:
    """Assert that two models' weights after `at_step` updates differ by rounding alone."""
    share = weights_times_tolerance(found, expected, at_step)
    shares.append(share)
    assert share <= 1, f"weights: {share:.3g} times what rounding explains"


def tensor_times_tolerance(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors of one computation, in tolerances.

    It is measured by the largest of the numbers: a small one among large ones is the rest of a sum of large terms.
    """
    assert found.shape == expected.shape and found.dtype == expected.dtype
    precision = str(expected.dtype).removeprefix("torch.").replace("float32", "fp32").replace("bfloat16", "bf16")
    largest = expected.detach().double().abs().max().item()
    difference = (found.detach().double() - expected.detach().double()).abs().max().item()
    return _share(difference, tolerance(largest, precision=precision, quantity="tensor"))


def assert_same_tensor(found: Tensor, expected: Tensor, what: str = "tensor") -> None:
    """Assert that two tensors of one computation (logits, gradients) differ by rounding alone."""
    share = tensor_times_tolerance(found, expected)
    shares.append(share)
    assert share <= 1, f"{what}: {share:.3g} times what rounding explains"


def _share(difference: float, allowed: float) -> float:
    """Of what is allowed, what was taken."""
    if difference == 0:
        return 0.0
    return difference / allowed if difference < float("inf") and allowed > 0 else float("inf")
