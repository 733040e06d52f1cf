from __future__ import annotations

import pytest

from zerokara.samples.windows import Window, stride_of, windows


def test_the_example_of_the_docstring() -> None:
    assert list(windows(8, 4, 2)) == [Window(0, 0, 5, 1), Window(0, 2, 7, 5), Window(0, 3, 8, 7)]


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9, 10, 11, 30, 97])
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_each_token_is_scored_once_with_enough_context(num_tokens: int, stride: int) -> None:
    scored = []
    for window in windows(num_tokens, 8, stride):
        assert 1 <= window.num_inputs <= 8 and window.begin >= 0
        for target in range(window.first_target, window.end):
            scored.append(target)
            assert target - window.begin >= min(target, 8 - stride + 1)
    assert scored == list(range(1, num_tokens))


def test_the_stride_leaves_the_context_that_is_asked_for() -> None:
    assert [stride_of(8, 0.5), stride_of(8, 0), stride_of(1, 0.5), stride_of(8, 0.99)] == [4, 8, 1, 1]
