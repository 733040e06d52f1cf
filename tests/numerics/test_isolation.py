"""Intra-document masking: a document in a packed sequence is computed as alone, by a mask and by offsets."""

from functools import partial
from typing import Any
from unittest import mock

import flash
import numpy as np
import pytest
import rounding
import torch
from drawn_models import build
from shapes import shape_of

from zerokara.config.data import causal
from zerokara.model import attention, compilation, cpu_attention, layers, parallel
from zerokara.model.language_model import Decoder
from zerokara.samples.objective import Causal
from zerokara.training.run import as_tensors

EOD, VOCABULARY, LENGTH = 0, 300, 40
SHAPE = {"num_layers": 2, "hidden_size": 64, "num_attn_heads": 4, "seq_len": LENGTH, "init_std": 0.2}
FAMILIES = {
    "llama": {"num_kv_heads": 2},
    "llama_ungrouped": {},
    "qwen3": {"architecture": "qwen3", "num_kv_heads": 2},
    "gpt2": {"architecture": "gpt2"},
}


@pytest.fixture(autouse=True)
def _groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    parallel.start_alone()
    flash.install()
    monkeypatch.setenv(compilation.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()


def model_of(family: str) -> Decoder:
    torch.manual_seed(1)
    model = build(shape_of(VOCABULARY, **SHAPE, **FAMILIES[family]), seed=3)
    with torch.no_grad():
        for parameter in model.parameters():  # gpt2's biases start at 0, and would hide an error in them
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch_of(*ends: tuple[int, int], isolates: bool = True) -> list[torch.Tensor]:
    """Arguments for two sequences with end-of-document tokens, which open the next document, at these places."""
    ids = np.random.default_rng(len(ends)).integers(1, VOCABULARY, (2, LENGTH + 1))
    for row, position in ends:
        ids[row, position] = EOD
    return as_tensors(Causal(causal(LENGTH), EOD if isolates else None)(ids, np.arange(2)))


ENDS = (0, 11), (0, 25), (1, 0), (1, 7), (1, 8), (1, 39)
DOCUMENTS = slice(0, 11), slice(11, 25), slice(25, 40)
BATCHES = [batch_of(*ENDS), batch_of(), batch_of((1, 20), (0, 40))]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_document_is_computed_as_alone(family: str) -> None:
    model, (inputs, _, _, _, segments, _) = model_of(family), BATCHES[0]
    with torch.no_grad():
        isolated = model(inputs, segments_BS=segments)[0, :, :VOCABULARY]
        together = model(inputs)[0, :, :VOCABULARY]
        alone = [model(inputs[:1, span])[0, :, :VOCABULARY] for span in DOCUMENTS]
    assert isolated.std() > 0.5
    for number, (span, expected) in enumerate(zip(DOCUMENTS, alone, strict=True)):
        rounding.assert_same_tensor(isolated[span], expected)  # other lengths are summed in another order
        if number:  # the control
            assert rounding.tensor_times_tolerance(together[span], expected) > rounding.BROKEN


def test_by_default_nothing_is_masked() -> None:
    """The fast path runs: attention gets the causal flag, and no mask."""
    blocked = cpu_attention.blocked_attention
    with mock.patch.object(cpu_attention, "blocked_attention", wraps=blocked) as watched:
        model_of("llama")(*batch_of(*ENDS, isolates=False))
    assert [call.args[3:] for call in watched.call_args_list] == [(True, None, None)] * 2


def nats_and_gradients(model: Decoder, batch: list[torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    nats = model(*batch)
    nats.backward()
    return nats.item(), {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "compiled"), [("llama", False), ("qwen3", False), ("gpt2", False), ("llama", True), ("gpt2", True)]
)
def test_offsets_compute_what_a_mask_does(family: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, by torch's kernel for documents of many lengths; compiled once for any number of them."""
    model = model_of(family)
    expected = [nats_and_gradients(model, batch[:5]) for batch in BATCHES]  # without offsets: a mask
    monkeypatch.setattr(attention, "has_variable_length_kernel", lambda weight, head_dim: True)
    monkeypatch.setattr(layers, "is_batch_first", lambda _: True)
    monkeypatch.setattr(cpu_attention, "blocked_attention", lambda *_, **__: pytest.fail("a mask is used"))
    if compiled:
        assert compilation.start(model, BATCHES[0], log=print)
        torch.compiler.set_stance("fail_on_recompile")
    try:
        found = [nats_and_gradients(model, batch) for batch in BATCHES]
    finally:
        torch.compiler.set_stance("default")
    for (nats, gradients), (expected_nats, expected_gradients) in zip(found, expected, strict=True):
        rounding.assert_same_loss(nats, expected_nats)
        for name, gradient in gradients.items():
            rounding.assert_same_tensor(gradient, expected_gradients[name])
    moved = BATCHES[0][5].clone()
    moved[1] += 1  # the broken twin: a wrong offset
    if not compiled:
        wrong, _ = nats_and_gradients(model, [*BATCHES[0][:5], moved])
        assert rounding.times_tolerance([wrong], [expected[0][0]]) > rounding.BROKEN
