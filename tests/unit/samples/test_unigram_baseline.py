"""The unigram-entropy baseline, against a count over the targets of samples."""

from __future__ import annotations

import numpy as np
import pytest

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.manifest import Manifest
from zerokara.tokens.indexed import IndexedTokens, entropy, token_counts
from zerokara.training.planning import run_folder, run_plan
from zerokara.training.planning.run_plan import RunPlan

T5 = ("architecture=t5", "num_kv_heads=auto", "head_dim=16")


def prepared(span_data: dict[str, str], *settings: str) -> RunPlan:
    return run_plan.make_plan(load(PretrainConfig, span_data["config"], [*settings]), 1)


def test_the_baseline_of_a_t5_is_what_its_decoder_predicts(span_data: dict[str, str]) -> None:
    """Exactly, where samples begin anywhere; neither the corpus's own entropy nor its share of the targets will do."""
    plan = prepared(span_data, *T5)
    objective, baseline = plan.data.objective, plan.data.unigram_entropy
    tokens = np.asarray(IndexedTokens(plan.data.train_prefix).tokens, dtype=np.int64)
    num_samples, lengths = 60_000, objective.lengths
    starts = np.random.default_rng(0).integers(0, len(tokens), num_samples)
    batch = objective(tokens[(starts[:, None] + np.arange(lengths.raw)) % len(tokens)], np.arange(num_samples))
    counts = np.bincount(batch.labels.ravel(), minlength=plan.encoder.vocab_size)
    corpus = np.bincount(tokens, minlength=plan.encoder.vocab_size)
    expected = objective.target_counts(corpus)
    assert expected.sum() == pytest.approx(lengths.target) and lengths.num_spans > 1
    used, unused = objective.sentinel_ids[: lengths.num_spans], objective.sentinel_ids[lengths.num_spans :]
    assert (counts[used] == num_samples).all() and (expected[used] == 1).all() and not counts[unused].any()
    # Each count is that of independent draws, give or take their standard deviation.
    assert (np.abs(counts - num_samples * expected) / np.sqrt(np.maximum(1, num_samples * expected))).max() < 5
    # The entropy of counts is too low, by about half the number of ids over the number of targets (Miller, 1955).
    bias = np.count_nonzero(counts) / 2 / counts.sum()
    assert baseline == pytest.approx(entropy(counts) + bias, abs=0.002) and bias < 0.001
    for other in (entropy(corpus), entropy(corpus) * lengths.num_noise_tokens / lengths.target):
        assert abs(baseline - other) > 0.5


def test_the_baseline_of_a_decoder_is_the_entropy_of_the_corpus(span_data: dict[str, str]) -> None:
    plan = prepared(span_data)
    corpus = token_counts(IndexedTokens(plan.data.train_prefix))
    shares = corpus[corpus > 0] / corpus.sum()
    assert plan.data.unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum(), abs=1e-12)


@pytest.mark.parametrize("settings", [(), T5])
def test_the_plan_and_the_summary_tell_one_number(span_data: dict[str, str], settings: tuple[str, ...]) -> None:
    plan = prepared(span_data, *settings)
    row = dict(plan.rows())["baseline"]
    assert float(row.split()[0]) == pytest.approx(plan.data.unigram_entropy, abs=5e-4)
    facts = {"tokens": 1, "epochs": 1.0, "steps": 1, "first_loss": 6.0, "loss": 5.0}
    made = Manifest("3_train", {}, {}, {}, {**facts, "unigram_entropy": plan.data.unigram_entropy}, 1.0, "", {})
    assert dict(run_folder.summary_rows(made, plan.run_dir, plan.run_dir))["baseline"] == row
