from pathlib import Path

import numpy as np
import pytest
from configs import config_of
from made_examples import conversation, pair, write_examples

from zerokara.config.data import SampleLengths, packed
from zerokara.samples.packed_examples import ExampleData, PackedExamples
from zerokara.training.planning.schedule import Schedule, consumption

PAD, END = 0, 2
DECODER, BOTH = packed(32, 32, is_encoder_decoder=False), packed(32, 24, is_encoder_decoder=True)


def decoder_examples(num: int = 40) -> list[list[list[int]]]:
    chance = np.random.default_rng(1)
    return [conversation(chance, 90, END, turns=1 + number % 2) for number in range(num)]


def pair_examples(num: int = 40) -> list[list[list[int]]]:
    chance = np.random.default_rng(2)
    return [pair(chance, 90, END) for _ in range(num)]


def opened(folder: Path, examples: list, lengths: SampleLengths, both: bool) -> PackedExamples:
    return PackedExamples(write_examples(folder / "examples", examples), lengths, both, PAD)


def test_the_example_of_the_docstring(tmp_path: Path) -> None:
    packed_rows = opened(tmp_path, [[[7, 8], [5, 2]], [[9], [6, 2]]], packed(8, 8, False), both=False)
    assert len(packed_rows) == 1 and packed_rows.examples(0) == [0, 1]
    rows = packed_rows.many([0])
    assert rows.inputs.tolist() == [[7, 8, 5, 9, 6, 0, 0, 0]] and rows.labels.tolist() == [[8, 5, 2, 6, 2, 0, 0, 0]]
    assert rows.loss_mask.tolist() == [[0, 1, 1, 1, 1, 0, 0, 0]]
    assert rows.segments.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]] and rows.decoder_segments is None
    assert rows.document_offsets is not None and rows.document_offsets.tolist() == [0, 3, 5, 8]
    assert rows.document_offsets.dtype == np.int32 and len(rows.arguments()) == 7
    assert rows.num_examples is not None and rows.num_examples.tolist() == [2]
    assert packed_rows.padding_share == pytest.approx(3 / 8)


def learned_labels(rows: PackedExamples) -> dict[int, list[list[int]]]:
    """The learned labels of each example, by run: where a label is not learned, a run ends."""
    found: dict[int, list[list[int]]] = {}
    for row in range(len(rows)):
        made = rows.many([row])
        segments = made.segments if made.decoder_segments is None else made.decoder_segments
        for number, example in enumerate(rows.examples(row)):
            runs: list[list[int]] = [[]]
            here = segments[0] == number
            for label, learned in zip(made.labels[0, here].tolist(), made.loss_mask[0, here].tolist(), strict=True):
                runs = [*runs[:-1], [*runs[-1], label]] if learned else [*runs, []]
            found[example] = [run for run in runs if run]
    return found


def test_what_is_learned_is_the_answers_and_one_end_each(tmp_path: Path) -> None:
    examples = decoder_examples()
    rows = opened(tmp_path, examples, DECODER, both=False)
    found = learned_labels(rows)
    assert [found[number] for number in range(len(examples))] == [example[1::2] for example in examples]
    assert {len(example) for example in examples} == {2, 4}  # several turns too
    answers = [segment for runs in found.values() for segment in runs]
    assert all(segment[-1] == END and segment.count(END) == 1 for segment in answers)


def test_a_first_token_is_not_learned_where_nothing_predicts_it(tmp_path: Path) -> None:
    rows = opened(tmp_path, [[[], [7, 8, END]], [[5], [6, END]]], DECODER, both=False)
    assert learned_labels(rows) == {0: [[8, END]], 1: [[6, END]]}


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(("num_ranks", "micro"), [(1, 1), (1, 4), (2, 3), (3, 2)])
def test_a_validation_reads_every_example_once(tmp_path: Path, both: bool, num_ranks: int, micro: int) -> None:
    lengths, examples = (BOTH, pair_examples()) if both else (DECODER, decoder_examples())
    prefix = write_examples(tmp_path / "valid", examples)
    train = write_examples(tmp_path / "train", examples[:9])
    data = ExampleData.of_rows(PackedExamples(train, lengths, both, PAD, seed=1))
    evaluation = data.validation_batches(prefix, max_tokens=None)
    per_rank = [list(evaluation.batches(micro, rank, num_ranks)) for rank in range(num_ranks)]
    assert len({len(batches) for batches in per_rank}) == 1  # or ranks would wait for each other
    found = sorted(one for batches in per_rank for _, batch in batches for one in batch.labels[batch.loss_mask > 0])
    assert found == sorted(one for example in examples for segment in example[1::2] for one in segment)
    shapes = {batch.inputs.shape for batches in per_rank for _, batch in batches}
    assert shapes == {(micro, 32)}, "a surplus row is padding, and as long as any"


def test_a_validation_has_room_for_longer_examples_and_takes_the_first_tokens(tmp_path: Path) -> None:
    train = write_examples(tmp_path / "train", pair_examples(5))
    valid = write_examples(tmp_path / "valid", [*pair_examples(5), [[*[5] * 39, END], [*[5] * 59, END]]])
    data = ExampleData.of_rows(PackedExamples(train, BOTH, True, PAD, seed=1))

    def read(max_tokens: int | None) -> tuple[int, set[tuple[int, int]]]:
        made = [batch for _, batch in data.validation_batches(valid, max_tokens).batches(1)]
        assert all(batch.num_examples is not None for batch in made)
        lengths = {(batch.inputs.shape[1], batch.labels.shape[1]) for batch in made}
        return sum(int(batch.num_examples.sum()) for batch in made if batch.num_examples is not None), lengths

    assert read(None) == (6, {(40, 64)})
    assert read(sum(map(len, pair_examples(1)[0])) + 1)[0] == read(1)[0] == 1


def test_a_run_counts_positions_as_tokens(tmp_path: Path) -> None:
    train = write_examples(tmp_path / "train", decoder_examples(200))
    data = ExampleData.of_rows(PackedExamples(train, DECODER, False, PAD, seed=1), num_valid_tokens=7)
    (source,) = data.sources
    assert source.num_tokens == data.samples_per_epoch * 32 == len(data.tokens()) * 32 and source.num_valid_tokens == 7
    documents = [data.tokens().documents(row, 0, data.sources) for row in range(len(data.tokens()))]
    assert sorted(one for of_row in documents for _, one in of_row) == [*range(200)]
    schedule = Schedule.from_config(config_of(epochs=2.0), data.lengths.raw, data.samples_per_epoch, [])
    (use,) = consumption(data, schedule).sources
    assert use.epochs == pytest.approx(schedule.num_steps * 8 / data.samples_per_epoch) and use.epochs > 1
