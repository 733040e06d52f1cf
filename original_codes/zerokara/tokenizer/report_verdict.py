"""How a tokenizer's compression stands beside the others of its report, in a few sentences.

Only what was measured on the same text is compared: published figures are of other texts, on which bytes per token
differ by more than between tokenizers.
"""

from __future__ import annotations

from zerokara.tokenizer.report import OURS, Report
from zerokara.tokenizer.report_measures import Measures

_EQUAL = 0.005
"""Relative difference in tokens below which two tokenizers count as equal."""


def verdict(report: Report) -> str:
    """The sentences; they say so where there is nothing to compare with."""
    ours = report.all_sources[OURS]
    if not ours.tokens:
        return "There was no text to measure on."
    others = [name for name in report.all_sources if name != OURS]
    if not others:
        return (
            f"{_amounts(ours)}. No other tokenizer was measured: to compare with well-known ones, name some in "
            "compare_with (such as hf://openai-community/gpt2, downloaded before) and run step 1 again with --redo."
        )
    lossless = sorted(
        (name for name in others if report.all_sources[name].is_lossless), key=lambda n: report.all_sources[n].tokens
    )
    sentences = [f"{_amounts(ours)}."]
    if lossless:
        sentences.append(f"For the same text it needs {_listed([_beside(report, ours, name) for name in lossless])}.")
        sentences += [_rank(ours, [report.all_sources[name] for name in lossless])] if ours.is_lossless else []
    if not ours.is_lossless:
        sentences.append(f"It changes {_changed(ours)} of the lines itself, which saves tokens.")
    lossy = [
        f"{report.tokenizer_labels[name]} ({_changed(report.all_sources[name])})"
        for name in others
        if name not in lossless
    ]
    if lossy:
        sentences.append(f"Not comparable, because lines do not decode to what they were: {', '.join(lossy)}.")
    if lossless and any(source.measured_on != "held-out text" for source in report.sources):
        sentences.append("Some of this text was offered to its own training, which flatters it.")
    return " ".join(sentences)


def _amounts(measures: Measures) -> str:
    fertility = measures.tokens_per_word
    per_word = "" if fertility is None else f", {fertility:.2f} tokens per word"
    return f"{measures.rates()['bytes_per_token']:.3f} bytes per token{per_word}"


def _beside(report: Report, ours: Measures, name: str) -> str:
    theirs = report.all_sources[name]
    difference = ours.tokens / theirs.tokens - 1
    size = f"{report.tokenizers[name].vocab_size:,} pieces, {_amounts(theirs)}"
    label = f"{report.tokenizer_labels[name]} ({size})"
    if abs(difference) < _EQUAL:
        return f"as many tokens as {label}"
    return f"{abs(difference):.0%} {'more' if difference > 0 else 'fewer'} tokens than {label}"


def _rank(ours: Measures, others: list[Measures]) -> str:
    better = sum(one.tokens < ours.tokens for one in others)
    if not better:
        return "No other tokenizer here that gives the text back exactly compresses better."
    return (
        f"{better} of the {len(others)} others that give the text back exactly compress{'es' * (better == 1)} better."
    )


def _changed(measures: Measures) -> str:
    return f"{measures.round_trip_failures / max(measures.lines, 1):.0%}"


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
