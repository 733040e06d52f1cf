"""D9: with documents isolated, a document in a packed sequence is what it would be alone; without, it is not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import rounding
import torch

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.sample_lengths import causal
from zerokara.model import parallel
from zerokara.model.decoder import Decoder
from zerokara.model.megatron import build
from zerokara.model.shapes import ModelShape
from zerokara.samples.objective import Causal

EOD, VOCABULARY = 0, 300
SMALL = ["num_layers=3", "hidden_size=48", "num_attn_heads=4", "seq_len=40", "init_std=0.2"]
FAMILIES = {
    "llama": ["num_kv_heads=2"],
    "llama_ungrouped": [],
    "gpt2": ["architecture=gpt2"],
}


@pytest.fixture(scope="module", autouse=True)
def _groups() -> None:
    parallel.start_alone()


def model_of(family: str) -> Decoder:
    torch.manual_seed(1)
    settings = load(PretrainConfig, "/dev/null", [*SMALL, *FAMILIES[family]])
    model = build(ModelShape.from_config(settings, VOCABULARY))
    with torch.no_grad():
        for parameter in model.parameters():  # gpt2's biases begin at 0, and would hide what goes wrong with them
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def packed() -> tuple[np.ndarray, list[slice]]:
    """Two sequences of 40 inputs and a label, and where the documents of the first lie among its inputs.

    An end of document that is read opens the next document. The second sequence begins with one, and has two in a row.
    """
    chance = np.random.default_rng(0)
    ids = chance.integers(1, VOCABULARY, (2, 41))
    ids[0, [11, 25]] = EOD
    ids[1, [0, 7, 8, 39]] = EOD
    return ids, [slice(0, 11), slice(11, 25), slice(25, 40)]


def gradient_of_second_document(family: str, isolate: bool) -> torch.Tensor:
    """Of the second document's loss with respect to each position's embedding in the first sequence, [S, D]."""
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
def test_each_document_is_what_it_is_alone(family: str) -> None:
    model, (ids, documents) = model_of(family), packed()
    batch = Causal(causal(ids.shape[1] - 1), EOD)(ids, np.arange(len(ids)))
    inputs, segments = torch.from_numpy(batch.inputs), torch.from_numpy(batch.segments)
    with torch.no_grad():
        isolated = model(inputs, segments_BS=segments)[0, :, :VOCABULARY]
        together = model(inputs)[0, :, :VOCABULARY]
        alone = [model(inputs[:1, place])[0, :, :VOCABULARY] for place in documents]
    assert isolated.std() > 0.5
    for place, expected in zip(documents, alone, strict=True):
        rounding.assert_same_tensor(isolated[place], expected)  # other lengths are added up in another order
    for place, expected in list(zip(documents, alone, strict=True))[1:]:  # the control
        assert rounding.tensor_times_tolerance(together[place], expected) > rounding.BROKEN


def test_positions_of_gpt2_must_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin that breaks one thing: masked, but with positions that go on, a document is not what it is alone."""
    from zerokara.model import decoder

    whole = decoder.isolation
    monkeypatch.setattr(
        decoder, "isolation", lambda segments: (torch.arange(segments.size(1)).expand_as(segments), whole(segments)[1])
    )
    ids, documents = packed()
    batch = Causal(causal(ids.shape[1] - 1), EOD)(ids, np.arange(len(ids)))
    for family, matters in (("gpt2", True), ("llama", False)):
        model = model_of(family)
        with torch.no_grad():
            got = model(torch.from_numpy(batch.inputs), segments_BS=torch.from_numpy(batch.segments))[0, documents[1]]
            expected = model(torch.from_numpy(batch.inputs[:1, documents[1]]))[0]
        assert ((got - expected)[:, :VOCABULARY].abs().max() > 0.1) == matters


def test_without_isolation_nothing_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the fast path runs: attention is told that it is causal, and given no mask."""
    from zerokara.model import attention

    seen = []
    plain = attention.scaled_dot_product_attention

    def watched(*arrays: torch.Tensor, **settings: object) -> torch.Tensor:
        seen.append((settings["attn_mask"] is None, settings["is_causal"]))
        return plain(*arrays, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "scaled_dot_product_attention", watched)
    model, (ids, _) = model_of("llama"), packed()
    batch = Causal(causal(ids.shape[1] - 1))(ids, np.arange(len(ids)))
    assert batch.segments is None
    model(torch.from_numpy(batch.inputs))
    assert seen == [(True, True)] * 3


def test_a_run_with_isolated_documents_is_another_and_the_same_in_every_stage_of_zero(train_runs: Callable) -> None:
    # At the rate of the other tests this run passes a spike of its loss, which makes much of a last digit.
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
