"""Shapes count what is built; the chunked loss equals cross-entropy; attention masks what it must."""

from __future__ import annotations

from typing import Any

import pytest
import rounding
import torch
from shapes import named, shape_of
from torch.nn.functional import cross_entropy

from zerokara.model import loss as loss_module
from zerokara.model.attention import intra_document_mask
from zerokara.model.builder import build, num_parameters
from zerokara.model.language_model import EncoderDecoder


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_kv_heads": 2},
        {"tie_word_embeddings": False},
        {"architecture": "qwen3"},
        {"architecture": "gpt2"},
        {"architecture": "gpt2", "tie_word_embeddings": False, "ffn_hidden_size": 100},
        {"num_kv_heads": 2, "head_dim": 20},
        {"architecture": "t5"},
        {"architecture": "t5", "tie_word_embeddings": True, "head_dim": 16},
    ],
    ids=named,
)
def test_counted_parameters_are_those_built(overrides: dict[str, Any]) -> None:
    shape = shape_of(**overrides)
    model = build(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.num_parameters() == num_parameters(model)
    assert {name: tuple(part.shape) for name, part in model.named_parameters()} == shape.parameter_shapes()
    padding = shape.padded_vocab_size - shape.vocab_size
    copies = 1 if shape.tie_word_embeddings else 2
    assert shape.num_parameters() - shape.num_parameters(padded=False) == padding * 48 * copies


def test_flops_of_a_hand_counted_model() -> None:
    shape = shape_of(num_kv_heads=2, ffn_hidden_size=100)
    per_layer = 48 * (48 + 2 * 24) + 48 * 48 + 3 * 48 * 100
    assert shape.flops_per_token() == 6 * (2 * per_layer + 384 * 48) + 6 * 2 * 48 * 32


@pytest.mark.parametrize("chunk_bytes", [1, 384 * 4 * 7, 2**30])
def test_chunked_loss_equals_cross_entropy_and_its_gradients(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    monkeypatch.setitem(loss_module.CHUNK_BYTES, "cpu", chunk_bytes)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 8, generator=generator, requires_grad=True)
    weight = torch.randn(384, 8, generator=generator, requires_grad=True)
    labels = torch.randint(0, 300, (20,), generator=generator)
    mask = (torch.rand(20, generator=generator) < 0.7).float()
    (loss_module.cross_entropy(hidden[:, None], labels[None], mask[None], False, weight, 300) * 0.5).backward()
    got = hidden.grad.clone(), weight.grad.clone()  # type: ignore[union-attr]
    hidden.grad = weight.grad = None
    plain = cross_entropy((hidden @ weight.t())[:, :300], labels, reduction="none")
    (each,) = loss_module.cross_entropy(hidden[:, None], labels[None], None, True, weight, 300)
    rounding.assert_same_tensor(each, plain)
    assert not each.requires_grad
    ((plain * mask).sum() * 0.5).backward()
    rounding.assert_same_tensor(got[0], hidden.grad)  # type: ignore[arg-type]
    rounding.assert_same_tensor(got[1], weight.grad)  # type: ignore[arg-type]
    assert got[1][300:].abs().max() == 0


def test_the_future_is_not_seen() -> None:
    model = build(shape_of(num_kv_heads=2))
    ids = torch.randint(0, 300, (1, 16))
    changed = ids.clone()
    changed[0, 10] = (ids[0, 10] + 1) % 300
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def logits_of(model: EncoderDecoder, ids: torch.Tensor, target: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, decoder_input_ids_BT=target, **others)


def test_an_encoder_is_bidirectional_and_a_decoder_causal() -> None:
    model = build(shape_of(architecture="t5", head_dim=16))
    assert isinstance(model, EncoderDecoder)
    generator = torch.Generator().manual_seed(0)
    ids, target = (torch.randint(0, 300, (1, length), generator=generator) for length in (20, 12))
    before = logits_of(model, ids, target)
    assert before.shape == (1, 12, 384)
    changed = target.clone()
    changed[0, 7] = (target[0, 7] + 1) % 300
    after = logits_of(model, ids, changed)
    assert torch.equal(before[:, :7], after[:, :7]) and not torch.equal(before[:, 7:], after[:, 7:])
    last = ids.clone()
    last[0, -1] = (ids[0, -1] + 1) % 300
    assert not torch.isclose(before[:, 0], logits_of(model, last, target)[:, 0]).all()
    at = logits_of(model, ids, target, at_B=torch.tensor([4]))
    rounding.assert_same_tensor(at, before[:, 4:5])


def test_an_encoder_does_not_see_padding() -> None:
    model = build(shape_of(architecture="t5"))
    assert isinstance(model, EncoderDecoder)
    generator = torch.Generator().manual_seed(0)
    ids, target = (torch.randint(0, 300, (1, length), generator=generator) for length in (9, 5))
    longer = torch.cat([ids, torch.randint(0, 300, (1, 4), generator=generator)], dim=1)
    attention_mask = torch.tensor([[1] * 9 + [0] * 4])
    padded = logits_of(model, longer, target, encoder_attention_mask_BS=attention_mask)
    rounding.assert_same_tensor(padded, logits_of(model, ids, target))
    assert rounding.tensor_times_tolerance(logits_of(model, longer, target), padded) > rounding.BROKEN


def test_flops_of_an_encoder_decoder_by_hand() -> None:
    """One sample of 34 raw tokens, 32 for the encoder and 8 for the decoder: weights by the tokens they multiply."""
    shape = shape_of(architecture="t5", head_dim=16, num_attn_heads=6, ffn_hidden_size=100)
    assert (shape.raw_len, shape.seq_len, shape.target_len) == (34, 32, 8)
    attention, mlp, queries = 4 * 48 * 96, 3 * 48 * 100, 96
    encoder = 32 * (attention + mlp) + 2 * 32 * 32 * queries
    decoder = 8 * (attention + mlp) + 8 * 8 * queries  # causal: half
    cross_attention = 8 * 2 * 48 * 96 + 32 * 2 * 48 * 96 + 2 * 32 * 8 * queries
    expected = 6 * (2 * (encoder + decoder + cross_attention) + 8 * 384 * 48) / 34
    assert shape.flops_per_token() == pytest.approx(expected)


def test_the_intra_document_mask_by_hand() -> None:
    positions, may_attend = intra_document_mask(torch.tensor([[0, 0, 1, 1], [1, 2, 2, 2]]))
    assert positions.tolist() == [[0, 1, 0, 1], [0, 0, 1, 2]]
    assert may_attend.shape == (2, 1, 4, 4)
    assert may_attend[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert may_attend[1, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
