"""Where layers cannot be compiled, functions are: they train as eager ones, and training calls what was compiled."""

from __future__ import annotations

from typing import Any

import pytest
import rounding
from configs import RECIPE
from programs import answers_of

COMMON = RECIPE | {
    "num_layers": 2, "hidden_size": 64, "num_attn_heads": 4, "seq_len": 24, "micro_batch_size": 2,
    "global_batch_size": 4, "precision": "fp32",
}  # fmt: skip
ZERO_3 = {"zero_stage": 3}
SHARED = {"zero_stage": 0, "tensor_parallel_size": 2, "global_batch_size": 2}
RUNS: dict[str, dict[str, Any]] = {
    "llama, ZeRO 3": {**ZERO_3, "num_kv_heads": 2},
    "gpt2, ZeRO 3, checkpointing": {**ZERO_3, "architecture": "gpt2", "activation_checkpointing": "full"},
    "qwen3, tensor parallel": {**SHARED, "architecture": "qwen3"},
}
ROTATED = ("llama", "qwen3")
PARALLEL = {"largest_logits", "sums_of_exponentials", "exponentials_times_mask"}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, python_path: None) -> dict[str, dict[str, Any]]:
    jobs = {name: COMMON | settings for name, settings in RUNS.items()}
    return answers_of("measure_compiled_functions.py", jobs, tmp_path_factory.mktemp("functions"))


@pytest.mark.parametrize("name", RUNS)
def test_compiled_functions_train_as_eager_ones(seen: dict[str, Any], name: str) -> None:
    rounding.assert_same_curve(seen[name]["compiled"], seen[name]["eager"])
    assert seen[name]["compiled"][0] > seen[name]["compiled"][-1], "they train"


@pytest.mark.parametrize("name", RUNS)
def test_the_training_calls_what_was_compiled(seen: dict[str, Any], name: str) -> None:
    calls, settings = seen[name]["calls"], RUNS[name]
    softmax = PARALLEL if "tensor_parallel_size" in settings else {"softmax_times_mask"}
    rotates = {"apply_rotary_pos_emb_bshd"} if name.split(",")[0] in ROTATED else set()
    assert set(calls) == softmax | rotates | {"plain_activate"}, seen[name]["log"]
    times = 2 if "checkpointing" in name else 1  # computed again
    assert calls["plain_activate"] == 3 * 2 * times, "steps, layers"
    # Those of the loss once; the others for training and evaluation; rotation of queries and of fewer keys.
    sizes = 1 + len(rotates) * (2 if "num_kv_heads" in settings else 1)
    assert seen[name]["captured"] == len(softmax) + 2 * sizes
