"""Intra-document masking: a document in a packed sequence is computed as it would be alone; without it, it is not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import rounding
import torch
from shapes import shape_of

from zerokara.config.data import causal
from zerokara.model import attention, language_model, parallel
from zerokara.model.builder import build
from zerokara.model.language_model import Decoder
from zerokara.samples.objective import Causal

EOD, VOCABULARY = 0, 300
SMALL = {"num_layers": 3, "seq_len": 40, "init_std": 0.2}
FAMILIES = {
    "llama": {**SMALL, "num_kv_heads": 2},
    "llama_ungrouped": SMALL,
    "gpt2": {**SMALL, "architecture": "gpt2"},
}


@pytest.fixture(scope="module", autouse=True)
def _groups() -> None:
    parallel.start_alone()


def model_of(family: str) -> Decoder:
    torch.manual_seed(1)
    model = build(shape_of(VOCABULARY, **FAMILIES[family]))
    with torch.no_grad():
        for parameter in model.parameters():  # gpt2's biases start at 0, and would hide an error in them
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def packed() -> tuple[np.ndarray, list[slice]]:
    """Two sequences of 40 inputs and a label, and where the documents of the first lie among its inputs.

    An end-of-document token among the inputs opens the next document. The second sequence starts with one, and has two
    in a row.
    """
    chance = np.random.default_rng(0)
    ids = chance.integers(1, VOCABULARY, (2, 41))
    ids[0, [11, 25]] = EOD
    ids[1, [0, 7, 8, 39]] = EOD
    return ids, [slice(0, 11), slice(11, 25), slice(25, 40)]


def gradient_of_second_document(family: str, isolate: bool) -> torch.Tensor:
    """Gradient of the second document's loss with respect to each position's embedding, [S, D]."""
    model, (ids, documents) = model_of(family), packed()
    batch = Causal(causal(ids.shape[1] - 1), EOD if isolate else None)(ids, np.arange(len(ids)))
    kept: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, _inputs: object, out: torch.Tensor) -> None:
        out.retain_grad()
        kept.append(out)

    model.embedding.register_forward_hook(keep)
    mask = torch.zeros(2, 40)
    mask[0, documents[1]] = 1
    segments = None if batch.segments is None else torch.from_numpy(batch.segments)
    model(torch.from_numpy(batch.inputs), torch.from_numpy(batch.labels), mask, segments).backward()
    assert kept[0].grad is not None
    return kept[0].grad[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_gradient_crosses_from_one_document_into_another(family: str) -> None:
    _, (first, second, third) = packed()
    isolated = gradient_of_second_document(family, isolate=True)
    assert isolated[first].abs().max() == 0 and isolated[third].abs().max() == 0  # exactly
    assert (isolated[second].abs().amax(dim=1) > 0).all()
    together = gradient_of_second_document(family, isolate=False)  # the control
    assert (together[first].abs().amax(dim=1) > 1e-4).all() and together[third].abs().max() == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_each_document_is_computed_as_alone(family: str) -> None:
    model, (ids, documents) = model_of(family), packed()
    batch = Causal(causal(ids.shape[1] - 1), EOD)(ids, np.arange(len(ids)))
    inputs, segments = torch.from_numpy(batch.inputs), torch.from_numpy(batch.segments)
    with torch.no_grad():
        isolated = model(inputs, segments_BS=segments)[0, :, :VOCABULARY]
        together = model(inputs)[0, :, :VOCABULARY]
        alone = [model(inputs[:1, span])[0, :, :VOCABULARY] for span in documents]
    assert isolated.std() > 0.5
    for span, expected in zip(documents, alone, strict=True):
        rounding.assert_same_tensor(isolated[span], expected)  # other lengths are summed in another order
    for span, expected in list(zip(documents, alone, strict=True))[1:]:  # the control
        assert rounding.tensor_times_tolerance(together[span], expected) > rounding.BROKEN


def test_positions_of_gpt2_must_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: masked, but with positions that do not restart, a document is not computed as alone."""

    def without_restart(segments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(segments.size(1)).expand_as(segments), attention.intra_document_mask(segments)[1]

    monkeypatch.setattr(language_model, "intra_document_mask", without_restart)
    ids, documents = packed()
    batch = Causal(causal(ids.shape[1] - 1), EOD)(ids, np.arange(len(ids)))
    for family, matters in (("gpt2", True), ("llama", False)):
        model = model_of(family)
        with torch.no_grad():
            got = model(torch.from_numpy(batch.inputs), segments_BS=torch.from_numpy(batch.segments))[0, documents[1]]
            expected = model(torch.from_numpy(batch.inputs[:1, documents[1]]))[0]
        assert ((got - expected)[:, :VOCABULARY].abs().max() > 0.1) == matters


def test_by_default_nothing_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast path runs: attention gets the causal flag, and no mask."""
    calls = []
    plain = attention.scaled_dot_product_attention

    def watched(*arrays: torch.Tensor, **settings: object) -> torch.Tensor:
        calls.append((settings["attn_mask"] is None, settings["is_causal"]))
        return plain(*arrays, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "scaled_dot_product_attention", watched)
    model, (ids, _) = model_of("llama"), packed()
    batch = Causal(causal(ids.shape[1] - 1))(ids, np.arange(len(ids)))
    assert batch.segments is None
    model(torch.from_numpy(batch.inputs))
    assert calls == [(True, True)] * 3


def test_a_run_with_masking_differs_and_is_the_same_in_every_zero_stage(train_runs: Callable) -> None:
    # At the learning rate of the other tests this run has a loss spike, which amplifies a last digit.
    common = {"lr": 0.003, "eval_interval": 10}
    isolated = {**common, "intra_document_masking": True}
    runs = train_runs(
        {
            "plain": {"zero_stage": 0, **common},
            "stage0": {"zero_stage": 0, **isolated},
            "stage3": {"zero_stage": 3, "micro_batch_size": 2, **isolated},
        }
    )
    rounding.assert_same_curve(runs["stage3"].losses, runs["stage0"].losses)
    assert len(runs["stage0"].losses) == 20
    assert rounding.times_tolerance(runs["plain"].losses, runs["stage0"].losses) > rounding.BROKEN
