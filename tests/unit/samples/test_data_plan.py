"""A run consumes what was declared, in the declared order, by any number of ranks."""

from pathlib import Path

import numpy as np
import pytest
from configs import config_of, fault_of
from token_sources import data_plan, plainly, settings, some_lengths, write_sources

from zerokara.samples.batches import Batches, BatchLayout
from zerokara.samples.objective import Causal
from zerokara.samples.order import BLOCK_SAMPLES, KeyedPermutation
from zerokara.samples.packed_tokens import DataPlan

SEQ_LEN = 8
TOTALS = (803, 4005, 330)  # 100, 500 and 41 samples
SEED = 77
STAGES = "[{tokens: 10400, source_weights: [3, 1, 0.5]}, {tokens: rest, source_weights: [0, 1, 1]}]"


@pytest.fixture
def owner(tmp_path: Path) -> dict[int, tuple[int, int]]:
    return write_sources(tmp_path, some_lengths(1, TOTALS))


def plan_of(folder: Path, *overrides: str, num_sources: int = 3) -> DataPlan:
    return data_plan(settings(folder, num_sources, f"seq_len={SEQ_LEN}", f"seed={SEED}", *overrides))


def consumed(plan: DataPlan, num: int, ranks: int = 1) -> list[list[int]]:
    """The samples of the first `num` positions as processes read them, put in the order of their positions."""
    batch, rows = BatchLayout(global_batch_size=48, micro_batch_size=2, num_ranks=ranks), dict[int, list[int]]()
    for rank in range(ranks):
        batches = Batches(plan.tokens(), plan.order(), batch, Causal(plan.lengths), rank)
        for first in range(0, num, 48):
            positions, read = batch.positions(first, rank).ravel().tolist(), list(batches.at(first))
            tokens = [np.concatenate([one.inputs, one.labels[:, -1:]], axis=1) for one in read]
            assert not rows.keys() & set(positions)
            rows.update(zip(positions, np.concatenate(tokens).tolist(), strict=True))
    assert sorted(rows) == list(range(-(-num // 48) * 48))
    return [rows[position] for position in range(num)]


def test_the_same_samples_are_consumed_by_any_number_of_ranks(tmp_path: Path, owner: dict) -> None:
    """test_order has the order itself."""
    plan = plan_of(tmp_path, f"stages={STAGES}")
    expected = consumed(plan, 2800)
    assert consumed(plan, 2800, ranks=3) == consumed(plan, 2800, ranks=8) == expected
    epochs, indices = plan.order().at_many(np.arange(0, 2800, 7))
    assert epochs.max() > 1
    for row, index, epoch in zip(expected[::7], indices.tolist(), epochs.tolist(), strict=True):
        own = list(dict.fromkeys(owner[token] for token in row))
        assert plan.tokens().documents(index, epoch, plan.sources) == own
        assert len({source for source, _ in own}) == 1  # no sample mixes sources
    stages = [[owner[row[0]][0] for row in stage] for stage in (expected[:1300], expected[1300:])]
    assert [stages[0].count(source) for source in range(3)] == plainly_counted((3, 1, 0.5), 1300)
    assert 0 not in stages[1] and abs(stages[1].count(1) - stages[1].count(2)) < BLOCK_SAMPLES
    second = [tuple(row) for row in expected if owner[row[0]][0] == 1]
    for epoch in (second[:500], second[500:1000]):
        labels = [label for row in epoch for label in row[1:]]
        assert len(labels) == len({*labels}) == 4000, "all of it, before any again"
    assert not {*second[500:1000]} & {*second[:500]}, "cut elsewhere"


def plainly_counted(weights: tuple[float, ...], num: int) -> list[int]:
    return [plainly(weights, num).count(source) for source in range(len(weights))]


def test_tokens_of_each_source_are_exactly_as_many_as_asked(tmp_path: Path, owner: dict) -> None:
    plan = plan_of(tmp_path, "stages=[{source_tokens: [800, 1600, 0]}, {source_tokens: [8, 0, 328]}]")
    sources = [owner[row[0]][0] for row in consumed(plan, 336)]
    assert [sources[:300].count(source) for source in range(3)] == [100, 200, 0]
    assert [stage.num_samples for stage in plan.stages] == [300, 42]
    assert plan.order().counts(342) == [101, 200, 41]  # type: ignore[union-attr]


def test_without_weights_the_stream_is_one(tmp_path: Path, owner: dict) -> None:
    plan = plan_of(tmp_path)
    assert plan.identity() is None and plan.samples_per_epoch == (sum(TOTALS) - 1) // SEQ_LEN
    first = int(KeyedPermutation(plan.samples_per_epoch, SEED, 0).at(np.array([0]))[0]) * SEQ_LEN
    assert consumed(plan, 1) == [list(range(first, first + SEQ_LEN + 1))]
    in_order = plan_of(tmp_path, "order=sequential")
    assert consumed(in_order, 101)[-1] == list(range(800, 809))  # across the edge of the first two sources
    assert plan_of(tmp_path, "stages=[{tokens: rest}]").stages[0].weights == (100, 500, 41), "proportional is by length"
    mixed = plan_of(tmp_path, "source_weights=replay")
    assert mixed.stages[0].weights == (3 * 541, 500, 41)
    assert mixed.order().counts(1024)[0] == 768, "a quarter is replayed"  # type: ignore[union-attr]


def test_a_mixture_of_other_sources_is_refused(tmp_path: Path, owner: dict) -> None:
    fault = fault_of(plan_of, tmp_path, "source_weights=[1, 1]", num_sources=2)
    assert (fault.where, fault.key, fault.value) == ("--set", "input_jsonl", ["a.jsonl", "b.jsonl"])
    assert "a.jsonl, b.jsonl, c.jsonl" in fault.rule and "--redo" in fault.remedy
    fault = fault_of(plan_of, tmp_path, "source_weights=[1, 1, 2]", "input_jsonl=[b.jsonl, a.jsonl, c.jsonl]")
    assert fault.key == "input_jsonl" and "a.jsonl, b.jsonl, c.jsonl" in fault.rule
    fault = fault_of(plan_of, tmp_path, "source_weights=[1, 0, 2]", "seq_len=400")
    assert (fault.where, fault.key, fault.value) == ("--set", "source_weights", [1.0, 0.0, 2.0])
    assert "c.jsonl" in fault.rule and "330" in fault.rule and "401" in fault.rule
    moved = plan_of(tmp_path, "source_weights=[1, 1, 2]", "input_jsonl=[x/a.jsonl, x/b.jsonl, x/c.jsonl]")
    assert moved.stages[0].weights == (1, 1, 2)  # the same text at another place


def test_a_stage_of_another_order_restarts_its_sources(tmp_path: Path, owner: dict) -> None:
    """In sequence each source is read from its beginning, though a part of its samples was read before."""
    first, second = "{tokens: 10400, source_weights: [3, 1, 0.5]}", "{tokens: rest, source_weights: [0, 1, 1], ORDER}"
    plan = plan_of(tmp_path, f"stages=[{first}, {second.replace('ORDER', 'order: sequential')}]")
    rows = consumed(plan, 2000, ranks=3)[1300:]
    read = [[row[0] for row in rows if owner[row[0]][0] == source] for source in (1, 2)]
    assert [one[0] for one in read] == [803, 803 + 4005] and read[0] == sorted(read[0])


def test_a_corpus_shorter_than_a_sequence_is_refused_with_numbers(tmp_path: Path) -> None:
    write_sources(tmp_path, [[10], [7]])
    fault = fault_of(plan_of, tmp_path, "seq_len=17", num_sources=2)
    assert (fault.where, fault.key, fault.value) == ("--set", "seq_len", 17)
    assert f"{tmp_path}/tokens_text_document.bin holds 17 tokens" in fault.rule
    assert "= 18" in fault.rule and "at most 16" in fault.remedy
    write_sources(tmp_path, [[]])
    fault = fault_of(plan_of, tmp_path, num_sources=1)
    assert "holds 0 tokens" in fault.rule and "seq_len" not in fault.remedy


def test_sources_that_are_not_the_tokens_are_refused(tmp_path: Path, owner: dict) -> None:
    manifest_path = tmp_path / "tokens_text_document.manifest.json"
    manifest_path.write_text(manifest_path.read_text(encoding="utf-8").replace("4005", "4004"), encoding="utf-8")
    fault = fault_of(data_plan, config_of(output_prefix=tmp_path / "tokens"))
    assert fault.where == str(manifest_path) and "5,137" in fault.rule and "5,138" in fault.rule
