"""Attention that is told where documents lie computes what a dense mask does, eagerly and compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import flash
import numpy as np
import pytest
import rounding
import torch
from shapes import shape_of

from zerokara.config.data import causal
from zerokara.model import attention, compilation, parallel
from zerokara.model.builder import build
from zerokara.model.language_model import Decoder
from zerokara.samples.objective import Causal
from zerokara.training.run import as_tensors

EOD, VOCABULARY = 0, 300
SHAPE = {"num_layers": 2, "num_kv_heads": 2, "hidden_size": 64, "num_attn_heads": 4, "seq_len": 40, "init_std": 0.2}


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    parallel.start_alone()
    flash.install()
    monkeypatch.setattr(attention, "has_variable_length_kernel", lambda weight, head_dim: True)
    monkeypatch.setenv(compilation.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()


def model_of(family: str) -> Decoder:
    settings = {**SHAPE, "architecture": family}
    if family == "gpt2":
        del settings["num_kv_heads"]
    return build(shape_of(VOCABULARY, **settings), seed=3)


def batch_of(*ends: tuple[int, int]) -> list[torch.Tensor]:
    """Arguments for two sequences with end-of-document tokens at these places."""
    ids = np.random.default_rng(len(ends)).integers(1, VOCABULARY, (2, 41))
    for row, position in ends:
        ids[row, position] = EOD
    return as_tensors(Causal(causal(40), EOD)(ids, np.arange(2)))


BATCHES = [batch_of((0, 11), (0, 25), (1, 0), (1, 7), (1, 8), (1, 39)), batch_of(), batch_of((1, 20), (0, 40))]


@pytest.mark.parametrize("batch", BATCHES, ids=["many", "none", "one"])
def test_offsets_are_those_of_a_plain_loop(batch: list[torch.Tensor]) -> None:
    segments, offsets = batch[3].tolist(), []
    for row, of_row in enumerate(segments):
        for position, segment in enumerate(of_row):
            if position == 0 or segment != of_row[position - 1]:
                offsets.append(row * 40 + position)
    assert batch[4].tolist() == [*offsets, 80] and batch[4].dtype == torch.int32


def nats_and_gradients(model: Decoder, batch: list[torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    nats = model(*batch)
    nats.backward()
    return nats.item(), {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "compiled"), [("llama", False), ("qwen3", False), ("gpt2", False), ("llama", True), ("gpt2", True)]
)
def test_it_computes_what_a_mask_does(family: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(family)
    expected = [nats_and_gradients(model, batch[:4]) for batch in BATCHES]  # without offsets: a mask
    masked = []
    monkeypatch.setattr("zerokara.model.attention.scaled_dot_product_attention", lambda *_, **__: masked.append(1))
    if compiled:
        assert compilation.start(model, 2, intra_document_masking=True, log=print)
        torch.compiler.set_stance("fail_on_recompile")  # whatever the number of documents
    try:
        found = [nats_and_gradients(model, batch) for batch in BATCHES]
    finally:
        torch.compiler.set_stance("default")
    assert not masked
    for (nats, gradients), (expected_nats, expected_gradients) in zip(found, expected, strict=True):
        rounding.assert_same_loss(nats, expected_nats)
        for name, gradient in gradients.items():
            rounding.assert_same_tensor(gradient, expected_gradients[name])


def test_a_wrong_offset_is_noticed() -> None:
    """The broken twin."""
    model, batch = model_of("llama"), BATCHES[0]
    expected, _ = nats_and_gradients(model, batch)
    moved = batch[4].clone()
    moved[1] += 1
    found, _ = nats_and_gradients(model, [*batch[:4], moved])
    assert rounding.times_tolerance([found], [expected]) > rounding.BROKEN


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "capability", "has"),
    [
        ("cuda", torch.bfloat16, 64, (9, 0), True),
        ("cuda", torch.bfloat16, 20, (9, 0), False),
        ("cuda", torch.bfloat16, 320, (9, 0), False),
        ("cuda", torch.float32, 64, (9, 0), False),
        ("cuda", torch.bfloat16, 64, (7, 5), False),
        ("cpu", torch.bfloat16, 64, (9, 0), False),
    ],
)
def test_where_it_serves(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, head_dim: int, capability: Any, has: bool
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    weight = type("Weight", (), {"is_cuda": device == "cuda", "dtype": dtype, "device": device})
    assert attention.has_variable_length_kernel(weight, head_dim) is has  # type: ignore[arg-type]
