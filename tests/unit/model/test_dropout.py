"""Dropout: which numbers, how many, and of which nothing depends that must not."""

import pytest
import torch
from drawn_models import build
from engines import random_batch
from shapes import shape_of
from torch import Tensor

from zerokara.config.engine import OptimSettings
from zerokara.model.dropout import Dropout
from zerokara.model.language_model import LanguageModel

BATCH, LENGTH, WIDTH = 16, 64, 96


def kept(numbers: Tensor, place: int, probability: float = 0.25, seed: int = 1234) -> Tensor:
    """What stays of ones, [S, B, D]."""
    dropout = Dropout(probability, seed)
    dropout.begin(numbers)
    return dropout(torch.ones(LENGTH, len(numbers), WIDTH, requires_grad=True), torch.tensor(place, dtype=torch.int32))


@pytest.mark.parametrize("probability", [0.01, 0.25, 0.9])
def test_the_share_is_the_probability_and_the_mean_stays(probability: float) -> None:
    found = kept(torch.arange(BATCH), 1, probability)
    deviation = (probability * (1 - probability) / found.numel()) ** 0.5
    assert float((found == 0).float().mean()) == pytest.approx(probability, abs=5 * deviation)
    assert found.max().item() == pytest.approx(1 / (1 - probability))


def test_masks_of_other_places_are_independent() -> None:
    """Of two masks with 0.25 each, a sixteenth is dropped in both: neighbours in any direction, and other seeds."""
    mask = kept(torch.arange(BATCH), 1) == 0
    others = {
        "layer": kept(torch.arange(BATCH), 2), "seed": kept(torch.arange(BATCH), 1, seed=1235),
        "epoch": kept(torch.arange(BATCH) + 10**6, 1),
    }  # fmt: skip
    pairs = {name: (mask, other == 0) for name, other in others.items()}
    for name, dim in (("position", 0), ("sequence", 1), ("feature", 2)):
        pairs[name] = (mask, mask.roll(1, dims=dim))
    for name, (one, other) in pairs.items():
        both = float((one & other).float().mean())
        assert both == pytest.approx(1 / 16, abs=5 * (1 / 16 / mask.numel()) ** 0.5), name
    by_feature, by_position = mask.float().mean((0, 1)), mask.float().mean((1, 2))
    assert by_feature.std() < 2 * (0.1875 / (LENGTH * BATCH)) ** 0.5
    assert by_position.std() < 2 * (0.1875 / (WIDTH * BATCH)) ** 0.5


@pytest.mark.parametrize("of", ["positions", "features"])
def test_no_two_masks_are_alike(of: str) -> None:
    """Each pair overlaps as often as chance has it; a hash that is stirred once less has pairs that differ by 12 σ."""
    sequences, width = (8, 4096) if of == "positions" else (64, 512)
    dropout = Dropout(0.25, 1234)
    dropout.begin(torch.arange(sequences))
    rows = (dropout(torch.ones(LENGTH, sequences, width, requires_grad=True), 1) == 0).flatten(0, 1).float()
    rows = rows if of == "positions" else rows.T
    assert rows.shape == (512, 4096)
    overlaps = (rows @ rows.T)[*torch.triu_indices(512, 512, 1)]
    deviation = (4096 * (1 / 16) * (15 / 16)) ** 0.5
    assert float((overlaps - 256).abs().max()) < 7 * deviation
    assert float(overlaps.std()) == pytest.approx(deviation, rel=0.03)


def test_a_mask_follows_the_number_of_its_sequence_alone() -> None:
    together = kept(torch.arange(100, 100 + BATCH), 3)
    assert torch.equal(together[:, 5:7], kept(torch.tensor([105, 106]), 3))
    assert not torch.equal(together[:, 5:7], kept(torch.tensor([106, 105]), 3))


def gradients(family: str, activation_checkpointing: str, micro_batches: int = 1) -> tuple[float, list[Tensor]]:
    shape = shape_of(architecture=family, num_layers=2, seq_len=24)
    model = build(shape, seed=1, activation_checkpointing=activation_checkpointing, settings=OptimSettings(dropout=0.2))
    batch = random_batch(shape, 4, torch.Generator().manual_seed(2))
    total = 0.0
    for part in zip(*(each.chunk(micro_batches) for each in batch), strict=True):
        nats = model(*part)
        nats.backward()
        total += nats.item()
    return total, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_recomputation_and_micro_batches_give_the_same_gradients(family: str) -> None:
    nats, expected = gradients(family, "off")
    for mode in ("selective", "full"):
        again, found = gradients(family, mode)
        assert again == nats and all(map(torch.equal, found, expected)), mode
    parts, found = gradients(family, "off", micro_batches=2)
    assert parts == pytest.approx(nats, rel=1e-6)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_only_training_drops() -> None:
    shape = shape_of(seq_len=24)
    model, plain = (build(shape, seed=1, settings=OptimSettings(dropout=share)) for share in (0.5, 0.0))
    assert isinstance(model, LanguageModel)
    batch = random_batch(shape, 2, torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert model(*batch) == plain(*batch)
    assert abs(float(model(*batch)) - float(plain(*batch))) > 0.01
    with pytest.raises(AssertionError, match="numbers of the sequences"):
        model(*batch[:3])


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_each_place_of_a_model_has_masks_of_its_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, drop = list[int](), Dropout.__call__

    def watched(self: Dropout, hidden: Tensor, place: Tensor | int = 0) -> Tensor:
        seen.append(int(place))
        return drop(self, hidden, place)

    monkeypatch.setattr(Dropout, "__call__", watched)
    shape = shape_of(architecture=family, num_layers=2, seq_len=24)
    model = build(shape, seed=1, settings=OptimSettings(dropout=0.2))
    model(*random_batch(shape, 2, torch.Generator().manual_seed(2)))
    assert len({*seen}) == len(seen) == (1 + 2 * 2 if family == "llama" else 2 + 2 * 2 + 3 * 2)
