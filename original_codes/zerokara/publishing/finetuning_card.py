"""What the model card says of a fine-tuning: its introduction, its section, and `model-index` for the Hub.

In: the facts of `zerokara.examples.facts.FinetuneFacts`, as JSON. Format of `model-index`: huggingface_hub's
`EvalResult`.
"""

from __future__ import annotations

from typing import Any

from huggingface_hub import EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index

from zerokara import markdown

METRIC_NAMES = {
    "loss": "loss (nats per token)",
    "accuracy": "accuracy",
    "macro_f1": "macro F1",
    "exact_match": "exact match",
    "word_accuracy": "words right",
    "chrf": "chrF",
}
_HUB_METRICS = {"macro_f1": "f1"}
"""Where the Hub has another name."""
_POINTS = ("loss", "chrf")
"""Metrics that are no shares: loss in nats, chrF from 0 to 100."""


def introduction(facts: dict[str, Any]) -> str:
    """Say what was fine-tuned from what, for what."""
    train = facts["data"].get("train")
    examples = f" on {train['kept'] + train['cut']:,} examples" if train else ""
    return f"fine-tuned from {markdown.inline(facts['init_from'])}{examples} for: {markdown.inline(facts['task'])}"


def section(facts: dict[str, Any]) -> str:
    """The section of the card: what became of the examples, and the metric with its interval and baselines."""
    names = {
        "kept": "used", "cut": "used with a shortened prompt", "dropped": "too long, left out", "bad": "unreadable",
        "tokens": "tokens", "learned_tokens": "tokens learned", "cut_learned_tokens": "answer tokens cut away",
    }  # fmt: skip
    header = ["split", *names.values()]
    rows = [[split, *(f"{counts[key]:,}" for key in names)] for split, counts in facts["data"].items()]
    return "\n\n".join(["## Fine-tuning", markdown.table(header, rows), *_results(facts)])


def model_index(facts: dict[str, Any], title: str, task: str) -> list[dict[str, Any]]:
    """The value of `model-index`; empty without a test."""
    test, metric = facts["test"], facts["metric"]
    if not test:
        return []
    interval = f"95 % interval {found}, " if (found := _interval(test, metric)) else ""
    result = EvalResult(
        task_type=task,
        dataset_type="held-out",
        dataset_name=facts["task"],
        dataset_split="test",
        metric_type=_HUB_METRICS.get(metric, metric),
        metric_name=f"{METRIC_NAMES.get(metric, metric)} ({interval}n = {test['num_examples']:,})",
        metric_value=test["value"],
    )
    return list(eval_results_to_model_index(title, [result]))


def _results(facts: dict[str, Any]) -> list[str]:
    """The table of the test, this model first."""
    test, metric = facts["test"], facts["metric"]
    if not test:
        return []
    name = METRIC_NAMES.get(metric, metric)
    rows = [["**this model**", _value(test["value"], metric), _interval(test, metric)]]
    rows += [[markdown.inline(other), _value(value, metric), ""] for other, value in facts["baselines"].items()]
    said = f"On {test['num_examples']:,} examples of the test data, which were read once, at the end:"
    return [said, markdown.table(["", name, "95 % interval"], rows)]


def _interval(test: dict[str, Any], metric: str) -> str:
    """The 95 % interval; empty where there is none."""
    return "" if test["low"] is None else f"{_value(test['low'], metric)} to {_value(test['high'], metric)}"


def _value(value: float, metric: str) -> str:
    return f"{value:.4f}" if metric == "loss" else f"{value:.2f}" if metric in _POINTS else f"{value:.2%}"
