"""What a validation counts: bits per byte of the text alone, and the control tokens apart."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import engines
import numpy as np
import pytest
import rounding
import torch
from drawn_models import build
from foreign_models import LLAMA_3, byte_level
from made_tokens import write_documents
from tiny import T5
from toy_tokenizers import TrainToy

from zerokara.config.evaluate_config import EvaluateConfig
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.evaluation import bits_per_byte
from zerokara.evaluation.inputs import MeasuredText
from zerokara.evaluation.models import open_models
from zerokara.huggingface import families, to_hf, tokenizer_json
from zerokara.samples.batches import ValidationBatches, validation_batches
from zerokara.samples.packed_tokens import document_bounds
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.hugging_face import open_encoder
from zerokara.tokens.indexed import IndexedTokens
from zerokara.training import run
from zerokara.training.planning.run_plan import RunPlan, make_plan
from zerokara.training.validation import LossValidation

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _alone() -> Iterator[None]:
    engines.join_alone()
    yield
    engines.leave()


@pytest.mark.parametrize("architecture", [{}, T5], ids=["decoder", "encoder-decoder"])
def test_bits_per_byte_are_of_the_text_alone(span_data: dict[str, str], architecture: dict[str, str]) -> None:
    settings = [f"{key}={value}" for key, value in {**architecture, "eval_tokens": "all"}.items()]
    plan = make_plan(load(PretrainConfig, span_data["config"], settings))
    torch.manual_seed(3)
    model = build(plan.shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # else every token costs about the same, and it does not matter which ones count
    result = LossValidation(plan, CPU)(model)
    assert result is not None and model.training
    found = result.line

    labels, nats = by_hand(plan, model)
    end, sentinels = plan.encoder.eos_id, plan.data.objective.sentinel_ids
    is_end, is_sentinel = labels == end, np.isin(labels, sentinels)
    is_text = ~is_end & ~is_sentinel
    num_bytes = sum(len(plan.encoder.token_texts[label]) for label in labels)
    rounding.assert_same_loss(found["valid_bits_per_byte"], nats[is_text].sum() / math.log(2) / num_bytes)
    rounding.assert_same_loss(found["valid_end_nats"], nats[is_end].mean())
    rounding.assert_same_loss(found["valid_loss"], nats.mean())
    assert found["valid_tokens"] == len(labels)
    # All of them in the figure, as it would be if nothing were kept apart, is another number.
    assert nats.sum() / math.log(2) / num_bytes > found["valid_bits_per_byte"] * 1.005
    assert is_end.any() and abs(nats[is_end].mean() - nats[is_text].mean()) > 0.01
    if architecture:
        rounding.assert_same_loss(found["valid_sentinel_nats"], nats[is_sentinel].mean())
    else:
        assert "valid_sentinel_nats" not in found
        tokens = IndexedTokens(plan.data.valid_prefix)
        texts = [plan.encoder.decode(ids) for ids in np.split(tokens.tokens, np.flatnonzero(tokens.tokens == end) + 1)]
        assert num_bytes == sum(len(text.encode()) for text in texts)


def test_an_unknown_token_is_no_text(plan_of: Callable[..., RunPlan]) -> None:
    """Its nats without its bytes would make a model look much worse."""
    plan = plan_of("eval_tokens=all")
    torch.manual_seed(3)
    model = build(plan.shape)
    labels, nats = by_hand(plan, model)
    taken = int(np.bincount(labels[labels > 8]).argmax())
    encoder = copy.copy(plan.encoder)
    encoder.unk_id = taken
    result = LossValidation(replace(plan, encoder=encoder), CPU)(model)
    is_text = (labels != encoder.eos_id) & (labels != taken)
    num_bytes = sum(len(encoder.token_texts[label]) for label in labels)  # a real <unk> has none
    assert result is not None and f"without {np.sum(labels == taken):,} unknown tokens" in result.messages[0]
    expected = nats[is_text].sum() / math.log(2) / num_bytes
    rounding.assert_same_loss(result.line["valid_bits_per_byte"], expected)
    rounding.assert_same_loss(result.line["valid_loss"], nats.mean())


def test_each_source_has_its_own_numbers(plan_of: Callable[..., RunPlan]) -> None:
    plan = plan_of("eval_tokens=all")
    model, bounds = build(plan.shape), document_bounds(IndexedTokens(plan.data.valid_prefix))
    sizes = [int(bounds[1]), int(bounds[-1] - bounds[1])]
    data, (source,) = plan.data, plan.data.training.sources
    sources = [replace(source, name=str(size), num_valid_tokens=size) for size in sizes]

    def batches(prefix: Path, most: int | None) -> ValidationBatches:
        return validation_batches(prefix, data.objective, plan.encoder.before_text, most, sizes)

    data = replace(data, training=replace(data.training, sources=tuple(sources)), validation_batches=batches)
    result = LossValidation(replace(plan, data=data), CPU)(model)
    assert result is not None and result.line["valid_source_positions"] == [0, 1]
    by_source = [by_hand(plan, model, sizes, part)[1].mean() for part in (0, 1)]
    for found, expected in zip(result.line["valid_loss_by_source"], by_source, strict=True):
        rounding.assert_same_loss(found, expected)
    assert abs(by_source[0] / by_source[1] - 1) > 1e-3


@pytest.mark.parametrize(
    ("settings", "kind"),
    [([], "step 1's"), (["intra_document_masking=true"], "step 1's"), ([], "dummy prefix"), ([], "Llama 3's")],
)
def test_step_8_measures_the_same(
    plan_of: Callable[..., RunPlan], train_toy: TrainToy, tmp_path: Path, settings: list[str], kind: str
) -> None:
    """On the exported model and the same documents, some shorter than the context and some much longer."""
    plan = plan_of(*settings)
    if kind == "dummy prefix":  # each line of a text, but for an empty one, begins with a space that is not in it
        plan = replace(plan, encoder=Encoder(train_toy(add_dummy_prefix=True)))
    if kind == "Llama 3's":  # each document begins with <|begin_of_text|>
        byte_level(tmp_path / "llama3", LLAMA_3, tokenizer_config={"eos_token": "<|end_of_text|>"})
        plan = replace(plan, encoder=open_encoder(tmp_path / "llama3"))
    encoder, shape = plan.encoder, plan.shape
    torch.manual_seed(3)
    model = build(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # so that what stands before a token matters
    ids = np.concatenate([document[:-1] for document in map(IndexedTokens(plan.data.valid_prefix).__getitem__, (0, 1))])
    lengths = [shape.seq_len * 3 + 5, 1, 7, shape.seq_len, shape.seq_len - 1, shape.seq_len + 1]
    texts = [plan_of().encoder.decode(part) for part in np.split(ids, np.cumsum(lengths))[:-1]]
    texts[0] = f"\n{texts[0]}\n\n\n{texts[0]}\n"
    encoded = [encoder.encode(text) for text in texts]
    assert len(encoded[0]) > 2 * shape.seq_len and min(map(len, encoded)) < shape.seq_len / 4
    written = [encoder.encode_joined([text])[0] for text in texts]
    write_documents(tmp_path / "some", written, np.dtype(np.uint16))
    batches = validation_batches(tmp_path / "some", plan.data.objective, encoder.before_text)  # type: ignore[arg-type]
    plan = replace(plan, data=replace(plan.data, validation_batches=lambda *_: batches))
    ours = LossValidation(plan, CPU)(model)

    folder, special = tmp_path / "hf", families.SpecialIds(encoder.bos_id, encoder.eos_id, encoder.pad_id)
    folder.mkdir()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    to_hf.write_model(folder, weights, shape, special, "fp32", "4GB")
    tokenizer_json.write(encoder, folder, shape.seq_len, False)
    opened = list(open_models([folder], "cpu"))
    as_it_is, without = (
        next(bits_per_byte.measure_texts([MeasuredText("some", tuple(texts), len(texts))], opened, each)).rows[0]
        for each in (EvaluateConfig(), EvaluateConfig(min_context=0))
    )
    assert ours is not None and as_it_is.value == pytest.approx(ours.line["valid_bits_per_byte"], rel=1e-5)
    assert as_it_is.details["end_nats_per_document"] == pytest.approx(ours.line["valid_end_nats"], rel=1e-5)
    assert without.value != pytest.approx(ours.line["valid_bits_per_byte"], rel=1e-4)  # windows without overlap


def by_hand(
    plan: RunPlan, model: torch.nn.Module, part_tokens: Sequence[int] = (), part: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The ids that a validation predicts in a part, and the nats of each, in double precision from the logits."""
    labels, nats, start = [], [], plan.encoder.eos_id
    opened = validation_batches(plan.data.valid_prefix, plan.data.objective, start, part_tokens=part_tokens)
    for batch in (batch for number, batch in opened.batches(4) if number == part):
        inputs, labels_BT, mask_BT, *others = run.as_tensors(batch)
        with torch.no_grad():
            logits = model(inputs, None, None, *others)[..., : plan.encoder.vocab_size].double()
        nats_BT = -logits.log_softmax(-1).gather(-1, labels_BT[..., None]).squeeze(-1)
        labels.append(labels_BT[mask_BT > 0].numpy())
        nats.append(nats_BT[mask_BT > 0].numpy())
    return np.concatenate(labels), np.concatenate(nats)
