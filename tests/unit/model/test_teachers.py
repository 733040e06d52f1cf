"""Learning from teachers: loss and gradients are those of plain torch, however the tokens are cut into chunks."""

import pytest
import rounding
import torch
from drawn_models import build
from shapes import shape_of
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from zerokara.model import loss, shapes
from zerokara.model.language_model import Decoder
from zerokara.model.layers import Kernels
from zerokara.model.loss import Teachers

BATCH, LENGTH = 3, 24
TEACHERS = {"architecture": "qwen3", "hidden_size": 32}, {"num_layers": 3}


def student_and_teachers(weight: float, *teachers: Decoder) -> Decoder:
    student = build(shape_of(seq_len=LENGTH), seed=1)
    assert isinstance(student, Decoder)
    student.teachers = Teachers(teachers, weight)
    return student


def drawn_teachers() -> list[Decoder]:
    models = [build(shape_of(seq_len=LENGTH, **each), seed=2 + number) for number, each in enumerate(TEACHERS)]
    for model in models:
        for parameter in model.parameters():
            parameter.requires_grad_(False).mul_(10)  # so that they are sure of something
    return models


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(5)
    ids, labels = (torch.randint(4, 300, (BATCH, LENGTH), generator=chance) for _ in range(2))
    return ids, labels, (torch.rand(BATCH, LENGTH, generator=chance) < 0.7).float(), torch.arange(BATCH)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, 2**30])
@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_loss_and_gradients_are_torchs(
    monkeypatch: pytest.MonkeyPatch, weight: float, chunk_bytes: int, is_fused: bool
) -> None:
    monkeypatch.setitem(shapes.CHUNK_BYTES, "cpu", chunk_bytes)
    teachers = drawn_teachers()
    student = student_and_teachers(weight, *teachers)
    student.kernels = Kernels(loss.SOFTMAX if is_fused else None)
    ids, labels, mask, numbers = batch()
    nats = student(ids, labels, mask, numbers)
    nats.backward()
    found = {name: parameter.grad.clone() for name, parameter in student.named_parameters()}
    student.zero_grad()
    real = student.shape.vocab_size
    logits = student(ids)[..., :real]
    taught = torch.stack([model(ids)[..., :real].softmax(-1) for model in teachers]).mean(0)
    plain = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(mask)
    divergence = kl_div(logits.log_softmax(-1), taught, reduction="none").sum(-1)
    assert float(taught.amax(-1).mean()) > 0.3 and float(divergence.detach().mean()) > 1
    expected = ((1 - weight) * plain + weight * divergence) * mask
    expected.sum().backward()
    rounding.assert_same_loss(nats.item(), expected.sum().item())
    for name, parameter in student.named_parameters():
        rounding.assert_same_tensor(found[name], parameter.grad, name)


def test_an_equal_teacher_teaches_nothing_and_validation_has_none() -> None:
    ids, labels, mask, numbers = batch()
    student = student_and_teachers(1.0, build(shape_of(seq_len=LENGTH), seed=1).requires_grad_(False))
    nats = student(ids, labels, mask, numbers)
    nats.backward()
    assert abs(nats.item()) < 1e-3 and all(each.grad.abs().max() < 1e-3 for each in student.parameters())
    with torch.no_grad():
        assert student(ids, labels, mask) == student_and_teachers(0.5)(ids, labels, mask) > 100
    assert not any("teacher" in name for name, _ in student.named_parameters()), "they are no part of the model"


def test_in_bf16_they_teach_the_same_within_its_rounding() -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        student = student_and_teachers(0.7, *(model.to(dtype) for model in drawn_teachers())).to(dtype)
        nats = student(*batch())
        nats.backward()
        found.append((nats.item(), torch.cat([each.grad.float().flatten() for each in student.parameters()])))
    (expected, gradient), (rounded, gradient_of_rounded) = found
    assert rounded == pytest.approx(expected, rel=5e-3)
    assert float(torch.nn.functional.cosine_similarity(gradient, gradient_of_rounded, dim=0)) > 0.97
