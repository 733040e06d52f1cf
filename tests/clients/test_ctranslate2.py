"""CTranslate2 converts an export and computes what transformers computes: probabilities and greedy tokens."""

from typing import Any

import numpy as np
import pytest
from clients.client_exports import DECODERS, EXPORTS, Exports, ask

TOLERANCE = 1e-4
"""Absolute, on log-probabilities of some units: fp32, with its own approximations of exponentials and GELU (2e-5)."""
REFUSED = ["mixtral", "qwen3_moe", "switch"]
"""Families that it does not know."""


@pytest.fixture(scope="module")
def answers(exports: Exports) -> dict[str, Any]:
    return ask("with_ctranslate2.py", "transformers4+inference", exports.folder, exports.questions)


@pytest.mark.parametrize("name", [name for name in EXPORTS if name not in REFUSED])
def test_what_it_computes_is_equal(answers: dict[str, Any], exports: Exports, new: dict[str, Any], name: str) -> None:
    found, expected = answers[name], log_softmax(np.array(new[name]["logits"]))
    if name in DECODERS:
        differences = np.abs(log_softmax(np.array(found["logits"])) - expected)
        ours = [tokens[-12:] for tokens in new[name]["greedy"]]
    else:
        targets = np.array(exports.questions["ids"])[:, ::-1]
        scores = np.take_along_axis(expected, targets[..., None], -1)[..., 0]
        differences = np.abs(np.array(found["scores"])[:, : targets.shape[1]] - scores)
        ours = [tokens[1:] for tokens in new[name]["greedy"]]  # without the padding that a decoder starts with
    assert differences.max() < TOLERANCE
    assert expected.std() > 0.5
    assert [their[: len(our)] for our, their in zip(ours, found["greedy"], strict=True)] == ours


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_convert_fails_loudly(answers: dict[str, Any], name: str) -> None:
    assert "No conversion is registered" in answers[name]["refused"]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
