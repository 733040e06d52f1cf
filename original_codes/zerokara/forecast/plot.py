"""A plot of a plan: the bits per byte of each size with its interval, and how well the law fits the small runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zerokara.durable import atomic_file
from zerokara.forecast.law import MeasuredRun, ScalingLaw
from zerokara.forecast.sizes import Candidate, effective_parameters
from zerokara.progress import count_text

PLOT_NAME = "plan.png"


def draw(
    path: Path, candidates: Sequence[Candidate], chosen: Candidate | None, law: ScalingLaw, runs: Sequence[MeasuredRun]
) -> None:
    """Draw into `path`, a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    for candidate in candidates:
        if candidate.prediction is None:
            continue
        value, low, high = candidate.prediction.value, candidate.prediction.low, candidate.prediction.high
        color = "tab:red" if candidate is chosen else "tab:blue" if candidate.fits else "lightgray"
        place = effective_parameters(candidate.shape)
        left.errorbar([place], [value], [[value - low], [high - value]], fmt="o", color=color, capsize=4)
        left.annotate(f"{candidate.name}\n{count_text(candidate.tokens)} tokens", (place, value), xytext=(6, 6),
                      textcoords="offset points", fontsize=8, color=color)  # fmt: skip
    left.set(xscale="log", xlabel="parameters that a token is multiplied with", ylabel="expected bits per byte")
    left.set_title("each size, with the tokens that there are" + (f" (red: {chosen.name})" if chosen else ""))
    lengths = np.geomspace(min(run.tokens for run in runs), max(run.tokens for run in runs))
    for place in sorted({run.parameters for run in runs}):
        some = [run for run in runs if run.parameters == place]
        values = [law.predict(place, each).value for each in lengths]
        line = right.plot(lengths, values, label=count_text(place))[0]
        right.plot([run.tokens for run in some], [run.bits_per_byte for run in some], "o", color=line.get_color())
    right.set(xscale="log", xlabel="tokens", ylabel="bits per byte")
    right.set_title("small runs (dots) and the law (lines)")
    right.legend(title="parameters")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=110)
    pyplot.close(figure)
