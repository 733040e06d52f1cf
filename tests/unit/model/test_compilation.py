"""When layers are compiled, when they run eagerly, and what happens when the compiler fails. Nothing is compiled."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import rounding
import torch
from drawn_models import build
from shapes import shape_of

from zerokara.model import compilation
from zerokara.model.builder import Decoder
from zerokara.model.compilation import CompiledFunction
from zerokara.model.megatron_core import rope_utils


@pytest.fixture(autouse=True)
def _no_traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv(compilation.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_bshd", compilation.rotate)


IDS = torch.zeros(2, 16, dtype=torch.int64)
BATCH = [IDS, IDS, torch.ones(IDS.shape)]


@pytest.fixture
def model() -> Decoder:
    return build(shape_of(50, hidden_size=32, num_kv_heads=2, seq_len=16), seed=1)


def test_a_function_of_the_layers_runs_compiled_in_training_alone() -> None:
    compiled = mock.Mock(side_effect=lambda values: 2 * values)
    with mock.patch.object(torch, "compile", return_value=compiled):
        double = CompiledFunction(lambda values: 2 * values, in_training=True)
    with torch.no_grad():
        assert double(1) == 2 and not compiled.called
    assert double(1) == 2 and compiled.call_count == 1


def test_code_with_another_kernel_of_attention_is_not_taken_from_torchs_cache(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "")
    tags = set()
    for is_enabled in (False, True):
        monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda is_enabled=is_enabled: is_enabled)
        compilation.start(model, BATCH, print)
        tags.add(torch.compiler.config.cache_key_tag)
    assert len(tags) == 2


@pytest.mark.parametrize("whole_layers", [True, False])
def test_what_cannot_compile_runs_eagerly(model: Decoder, whole_layers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = mock.Mock(side_effect=RuntimeError("no C++ compiler\nand a long story"))
    monkeypatch.setattr(torch, "compile", lambda *_, **__: compiled)  # fails at the first call
    expected, lines = model(*BATCH), []
    assert not compilation.start(model, BATCH, lines.append, whole_layers)
    assert all(line.endswith("RuntimeError: no C++ compiler") for line in lines[1:-1] or lines[1:])
    assert len(lines) == (2 if whole_layers else 6), "the layers, or each of four functions"
    found = model(*BATCH)
    found.backward()
    rounding.assert_same_loss(found.item(), expected.item())


@pytest.mark.parametrize("whole_layers", [True, False])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_lack_of_memory(model: Decoder, whole_layers: bool, wrapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    error: Exception = torch.OutOfMemoryError("CUDA out of memory")
    if wrapped:
        error, error.__cause__ = RuntimeError("backend='inductor' raised"), error
    monkeypatch.setattr(torch, "compile", lambda *_, **__: mock.Mock(side_effect=error))
    with pytest.raises(RuntimeError) as raised:
        compilation.start(model, BATCH, print, whole_layers)
    assert compilation.is_out_of_memory(raised.value)
    assert not compilation.is_out_of_memory(RuntimeError("no C++ compiler"))


def test_only_training_at_the_first_shape_is_compiled(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def counting(forward: Callable, **_: Any) -> Callable:
        def count(hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            calls.append(tuple(hidden_states.shape))
            return forward(hidden_states, *arguments, **named)

        return count

    monkeypatch.setattr(torch, "compile", counting)
    assert compilation.start(model, BATCH, log=lambda _: None)
    assert all(parameter.grad is None for parameter in model.parameters())
    larger = IDS.repeat(2, 1)
    model(larger, larger)
    with torch.no_grad():
        model(*BATCH)
    assert calls == [(16, 2, 32)] * 2  # the warm-up
    model(*BATCH)
    assert calls == [(16, 2, 32)] * 4
