"""Fine-tuning on packed examples: each is computed as alone, as Hugging Face's model does with labels of -100."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn_models import build
from made_examples import Example, conversation, pair, write_examples
from shapes import shape_of
from wide_weights import spread_weights

from zerokara.config.data import packed
from zerokara.huggingface.families import SpecialIds, stock_model_of
from zerokara.model import parallel
from zerokara.model.builder import Model
from zerokara.samples.objective import Batch
from zerokara.samples.packed_examples import PackedExamples, Pairs
from zerokara.training.run import as_tensors

PAD, END, VOCABULARY = 0, 2, 300
NUM_EXAMPLES = 14
MOE = {"num_experts": 4, "moe_layers": (1,)}
T5 = {"head_dim": 16}
FAMILIES = {
    "llama": {"num_kv_heads": 2},
    "gpt2": {"architecture": "gpt2"},
    "mixtral": {**MOE, "architecture": "mixtral", "moe_layers": "auto"},
    "t5": {**T5, "architecture": "t5"},
    "switch": {**T5, **MOE, "architecture": "switch"},
    "t5_moe": {**T5, **MOE, "architecture": "t5_moe"},
}


@pytest.fixture(scope="module", autouse=True)
def _groups() -> None:
    parallel.start_alone()


@dataclass(frozen=True)
class Case:
    """A model, examples, and the rows that they are packed into."""

    model: Model
    weights: dict[str, torch.Tensor]
    examples: list[Example]
    rows: PackedExamples
    objective: Pairs

    @property
    def is_pair(self) -> bool:
        return self.objective.start_id is not None

    def nats(self, rows: Batch, isolated: bool = True) -> torch.Tensor:
        """Nats of each position, whether it is learned or not."""
        batch = self.objective(rows, np.zeros(len(rows.inputs), np.int64))
        if not isolated:
            batch = replace(batch, segments=None, decoder_segments=None, document_offsets=None, num_examples=None)
        inputs, labels, mask, *others = as_tensors(batch)
        with torch.no_grad():
            return self.model(inputs, labels, mask, *others, per_token=True)

    def alone(self, example: int, folder: Path) -> Batch:
        """The row of a single example, without padding."""
        tokens = [len(segment) for segment in self.examples[example]]
        lengths = packed(*tokens, True) if self.is_pair else packed(sum(tokens) - 1, sum(tokens) - 1, False)
        written = write_examples(folder / f"alone_{example}", [self.examples[example]])
        return PackedExamples(written, lengths, self.is_pair, PAD).many([0])


def case_of(family: str, folder: Path) -> Case:
    shape = shape_of(VOCABULARY, seq_len=48, **FAMILIES[family])
    is_pair, chance = shape.traits.is_encoder_decoder, np.random.default_rng(5)
    examples: list[Example] = [
        pair(chance, VOCABULARY, END) if is_pair else conversation(chance, VOCABULARY, END, turns=1 + number % 2)
        for number in range(NUM_EXAMPLES)
    ]
    lengths = packed(24, 12, True) if is_pair else packed(48, 48, False)
    weights, model = spread_weights(shape), build(shape)
    model.load_state_dict(weights, strict=False)
    rows = PackedExamples(write_examples(folder / "examples", examples), lengths, is_pair, PAD)
    assert 2 < len(rows) < NUM_EXAMPLES / 2 and rows.padding_share > 0
    return Case(model, weights, examples, rows, Pairs(lengths, PAD if is_pair else None))


def largest_difference(case: Case, folder: Path, isolated: bool = True) -> float:
    """Between the nats of a position in a packed row and of the same position of the example alone."""
    together = case.nats(case.rows.many(np.arange(len(case.rows))), isolated)
    made = case.rows.many(np.arange(len(case.rows)))
    segments = torch.from_numpy(made.segments if made.decoder_segments is None else made.decoder_segments)
    differences, spread = [], []
    for row in range(len(case.rows)):
        for number, example in enumerate(case.rows.examples(row)):
            found, expected = together[row][segments[row] == number], case.nats(case.alone(example, folder))[0]
            differences.append((found - expected).abs().max())
            spread.append(expected)
    assert torch.cat(spread).std() > 0.5
    return float(torch.stack(differences).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_example_has_the_losses_that_it_has_alone(family: str, tmp_path: Path) -> None:
    case = case_of(family, tmp_path)
    assert largest_difference(case, tmp_path) < 1e-5
    assert largest_difference(case, tmp_path, isolated=False) > 0.1  # the twin: attention crosses examples


@pytest.mark.parametrize("family", ["t5", "switch"])
def test_padding_without_anything_to_attend_to_harms_nothing(family: str, tmp_path: Path) -> None:
    """Encoder inputs that fill their rows, and decoder targets that do not."""
    case = case_of(family, tmp_path)
    full = write_examples(tmp_path / "full", [[[*[5] * 11, END], [7, END]], [[*[6] * 11, END], [END]]])
    rows = PackedExamples(full, packed(24, 12, True), True, PAD)
    batch = case.objective(rows.many([0]), np.zeros(1, np.int64))
    assert batch.segments is not None and batch.segments.max() == 1
    assert batch.decoder_segments is not None and batch.decoder_segments.max() == 2
    nats = case.model(*as_tensors(batch))
    nats.backward()
    assert nats.isfinite() and all(
        each.grad.isfinite().all() for each in case.model.parameters() if each.grad is not None
    )


def of_hugging_face(case: Case) -> tuple[float, int]:
    """Nats and number of the learned tokens of each example by itself, by stock transformers with labels of -100."""
    model = stock_model_of(case.model.shape, case.weights, SpecialIds(None, END, PAD))
    nats, count = 0.0, 0
    for example in case.examples:
        ids = [one for segment in example for one in segment]
        labels = [one if number % 2 else -100 for number, segment in enumerate(example) for one in segment]
        if case.is_pair:
            ids, labels = list(example[0]), list(example[1])
        loss = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
        learned = sum(label != -100 for label in labels)
        nats, count = nats + float(loss) * learned, count + learned
    return nats, count


def of_ours(case: Case, moved_by: int = 0) -> tuple[float, float]:
    """Nats and number of the learned tokens of all rows, their mask moved by some positions."""
    made = case.rows.many(np.arange(len(case.rows)))
    made = replace(made, loss_mask=np.roll(made.loss_mask, moved_by, axis=1))
    batch = case.objective(made, np.zeros(len(case.rows), np.int64))
    with torch.no_grad():
        return float(case.model(*as_tensors(batch))), float(batch.loss_mask.sum())


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_the_loss_is_that_of_hugging_face_with_the_same_labels(family: str, tmp_path: Path) -> None:
    case = case_of(family, tmp_path)
    expected, count = of_hugging_face(case)
    found, num_learned = of_ours(case)
    assert num_learned == count
    assert abs(found - expected) / count < 1e-5
    for moved_by in (-1, 1):  # the twin: a mask that is off by one learns another token in each row
        wrong, wrong_count = of_ours(case, moved_by)
        assert abs(wrong / wrong_count - expected / count) > 0.01
