"""The unigram-entropy baseline, against a count over the targets of batches as training reads them."""

from __future__ import annotations

import numpy as np
import pytest

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.manifest import Manifest
from zerokara.samples.batches import Batches, BatchLayout
from zerokara.tokens.indexed import IndexedTokens, entropy, token_counts
from zerokara.training.planning import run_folder, run_plan
from zerokara.training.planning.run_plan import RunPlan

T5 = ("architecture=t5", "num_kv_heads=auto", "head_dim=16")
EPOCHS = 10


def prepared(span_data: dict[str, str], *settings: str) -> RunPlan:
    return run_plan.make_plan(load(PretrainConfig, span_data["config"], [*settings]), 1)


def counted(plan: RunPlan, epochs: int) -> tuple[np.ndarray, int]:
    """How often each id is a target that the loss counts, and in how many samples."""
    reading = plan.data.reading
    batches = Batches(reading.tokens(), reading.order(), BatchLayout(64, 64), plan.data.objective)
    counts = np.zeros(plan.encoder.vocab_size)
    starts = range(0, epochs * reading.samples_per_epoch - 64, 64)
    for start in starts:
        for batch in batches.at(start):
            counts += np.bincount(batch.labels.ravel(), batch.loss_mask.ravel(), plan.encoder.vocab_size)
    return counts, 64 * len(starts)


def test_a_t5_is_measured_by_what_its_decoder_predicts(span_data: dict[str, str]) -> None:
    plan = prepared(span_data, *T5)
    counts, num_samples = counted(plan, EPOCHS)
    corpus = token_counts(IndexedTokens(plan.data.train_prefix))
    expected, lengths = plan.data.objective.target_counts(corpus), plan.data.objective.lengths
    assert expected.sum() == pytest.approx(lengths.target) and lengths.num_spans > 1
    sentinels = plan.data.objective.sentinel_ids
    used, unused = sentinels[: lengths.num_spans], sentinels[lengths.num_spans :]
    assert (counts[used] == num_samples).all() and (expected[used] == 1).all() and not counts[unused].any()
    # A text of 28 thousand tokens is cut at the same places in each epoch, and the last of a sample is always masked.
    assert plan.data.unigram_entropy == pytest.approx(entropy(counts), abs=0.03)
    # Neither the corpus's own entropy nor its share of the targets will do.
    assert abs(plan.data.unigram_entropy - entropy(corpus)) > 0.5
    assert abs(plan.data.unigram_entropy - entropy(corpus) * lengths.num_noise_tokens / lengths.target) > 0.5


def test_a_t5_is_measured_exactly_where_samples_begin_anywhere(span_data: dict[str, str]) -> None:
    plan = prepared(span_data, *T5)
    tokens = np.asarray(IndexedTokens(plan.data.train_prefix).tokens, dtype=np.int64)
    num_samples, taken = 60_000, plan.data.objective.lengths.raw
    starts = np.random.default_rng(0).integers(0, len(tokens), num_samples)
    batch = plan.data.objective(tokens[(starts[:, None] + np.arange(taken)) % len(tokens)], np.arange(num_samples))
    counts = np.bincount(batch.labels.ravel(), minlength=plan.encoder.vocab_size)
    expected = num_samples * plan.data.objective.target_counts(np.bincount(tokens))
    # Each count is that of independent draws, give or take their standard deviation.
    assert (np.abs(counts - expected) / np.sqrt(np.maximum(1, expected))).max() < 5
    # The entropy of counts is too low, by about half the number of ids over the number of targets (Miller, 1955).
    bias = np.count_nonzero(counts) / 2 / counts.sum()
    assert plan.data.unigram_entropy == pytest.approx(entropy(counts) + bias, abs=0.002) and bias < 0.001


def test_a_decoder_is_measured_by_the_corpus(span_data: dict[str, str]) -> None:
    plan = prepared(span_data)
    corpus = token_counts(IndexedTokens(plan.data.train_prefix))
    shares = corpus[corpus > 0] / corpus.sum()
    assert plan.data.unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum(), abs=1e-12)
    counts, _ = counted(plan, 1)  # but for the first token, and what is left over at the end
    assert plan.data.unigram_entropy == pytest.approx(entropy(counts), abs=0.01)


@pytest.mark.parametrize("settings", [(), T5])
def test_the_plan_and_the_summary_tell_one_number(span_data: dict[str, str], settings: tuple[str, ...]) -> None:
    plan = prepared(span_data, *settings)
    row = dict(plan.rows())["baseline"]
    assert float(row.split()[0]) == pytest.approx(plan.data.unigram_entropy, abs=5e-4)
    facts = {"tokens": 1, "epochs": 1.0, "steps": 1, "first_loss": 6.0, "loss": 5.0}
    made = Manifest("3_train", {}, {}, {}, {**facts, "unigram_entropy": plan.data.unigram_entropy}, 1.0, "", {})
    assert dict(run_folder.summary_rows(made, plan.run_dir, plan.run_dir))["baseline"] == row
