"""The plots of a run, ``plots/*.png`` in its folder.

``python -m zerokara.training.monitoring.plots RUN_DIR [NICENESS]`` draws them from ``metrics.jsonl``: ``overview.png``
with all of them, and each by itself. Training runs it in another process (`step_metrics.Plots`).
"""

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # needs no display and no global state, as pyplot does
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, StrMethodFormatter

from zerokara.base.durable import PARTIAL_SUFFIX, atomic_file
from zerokara.base.errors import UserError
from zerokara.config.loading import RESOLVED_NAME, load_run
from zerokara.training.monitoring import step_metrics

BLUE, RED, GREEN, PURPLE, YELLOW, GREY = "#4477aa", "#cc3344", "#228833", "#aa3377", "#bb8800", "#777777"
"""Distinct for colour-blind readers too. Source: Paul Tol's bright scheme, a little darker."""
_STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    # Of sources and layers.
    "axes.prop_cycle": cycler(color=["#4477aa", "#ee8866", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb"]),
    "axes.grid": True,
    "axes.formatter.useoffset": False,  # 4.1061 4.1062, and not 0.0001 0.0002 beside a +4.106
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "text.parse_math": False,  # a name may have two $
    "legend.fontsize": 8,
}
_NAME_CHARACTERS = 28
"""Longest name of a curve: a legend should not hide the curves."""

Curve = tuple[list[float], list[Any]]
"""Tokens and values of one field, from the lines of metrics.jsonl that have it; a value may be a list."""


def draw(run_dir: Path) -> list[Path]:
    """Draw all plots of a run; none before there is a logged step."""
    folder = run_dir / "plots"
    for partial in folder.glob(f"*{PARTIAL_SUFFIX}"):  # of a drawing that was killed; there is never more than one
        partial.unlink(missing_ok=True)
    curves, names = _curves(step_metrics.read(run_dir)), curve_names(run_dir)
    panels = [name for name, (_, key, _, _) in _PANELS.items() if key in curves]
    if "loss" not in panels:
        return []
    with matplotlib.rc_context(_STYLE):
        rows = -(-len(panels) // 2)
        overview = Figure(figsize=(11, 3.1 * rows + 0.5), layout="constrained")
        overview.suptitle(run_dir.name, fontsize=13, fontweight="bold")
        grid = overview.subplots(rows, 2, squeeze=False).ravel()
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        figures = {"overview": overview}
        for name, axes in zip(panels, grid, strict=False):
            figures[name] = Figure(figsize=(8, 4.5), layout="constrained")
            figures[name].suptitle(run_dir.name, fontsize=9, color=GREY)
            for target in (axes, figures[name].subplots()):
                _fill(target, name, curves, names)
        for name, figure in figures.items():
            with atomic_file(folder / f"{name}.png") as file:
                figure.savefig(file, dpi=120, format="png")
    return [folder / f"{name}.png" for name in figures]


def _curves(lines: Iterable[dict[str, Any]]) -> dict[str, Curve]:
    """All curves of a run; one that is not there has no points."""
    curves: dict[str, Curve] = defaultdict(lambda: ([], []))
    for line in lines:
        for key, value in line.items():
            if value is not None:
                curves[key][0].append(line["tokens"])
                curves[key][1].append(value)
    return curves


def curve_names(run_dir: Path) -> dict[str, list[str]]:
    """Names of a run's ``sources``, and ``layers`` with experts; none without a readable configuration."""
    try:
        settings = load_run(run_dir / RESOLVED_NAME)
    except (UserError, OSError):
        return {"sources": [], "layers": []}
    files = [PurePosixPath(entry).name for entry in settings.source_entries]
    # A legend would leave a name out that begins with "_": before it stands a space without width.
    short = [("\u200b" if name.startswith("_") else "") + name[:_NAME_CHARACTERS] for name in files]
    sources = [name if short.count(name) == 1 else f"{number} {name}" for number, name in enumerate(short, start=1)]
    stacks = ("encoder ", "decoder ") if settings.traits.is_encoder_decoder else ("",)
    layers = [f"{stack}layer {layer}" for stack in stacks for layer in settings.resolved_sizes()["moe_layers"]]
    return {"sources": sources, "layers": layers}


def _fill(axes: Axes, name: str, curves: dict[str, Curve], names: dict[str, list[str]]) -> None:
    panel, _, title, height = _PANELS[name]
    axes.set(title=title, xlabel="tokens", ylabel=height)
    panel(axes, curves, names)
    for number, token in enumerate(sorted(set(curves["resumed"][0]))):
        label = "resumed" if number == 0 else None
        axes.axvline(token, color=GREY, linewidth=0.8, linestyle=(0, (2, 3)), zorder=0.5, label=label)
    axes.xaxis.set_major_formatter(_count_text)
    axes.margins(x=0.01)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend()


def _loss(axes: Axes, curves: dict[str, Curve], names: dict[str, list[str]]) -> None:
    tokens, losses = curves["loss"]
    axes.plot(tokens, losses, color=BLUE, alpha=0.35, linewidth=0.9, label="training")
    axes.plot(tokens, _smoothed(losses), color=BLUE, label="training, smoothed")
    axes.plot(*curves["valid_loss"], color=RED, marker="o", markersize=3, label="validation")
    _use_log_scale(axes, [*losses, *curves["valid_loss"][1]])


def _bits_per_byte(axes: Axes, curves: dict[str, Curve], names: dict[str, list[str]]) -> None:
    # A source without validation documents has no curve. If other sources were held out before, the curves restart.
    positions: list[list[int]] = curves["valid_source_positions"][1] or [[]]
    points = zip(*curves["valid_bits_per_byte_by_source"], positions, strict=False)
    newest = [(token, values) for token, values, each in points if each == positions[-1]]
    by_source = [token for token, _ in newest], [values for _, values in newest]
    for name, curve in _named(by_source, names["sources"], positions[-1]):
        axes.plot(*curve, linewidth=1, label=name)
    tokens, bits = curves["valid_bits_per_byte"]
    axes.plot(tokens, bits, color=RED, marker="o", markersize=3, label="all")
    best = min(range(len(bits)), key=bits.__getitem__)
    axes.plot(tokens[best], bits[best], "o", color=RED, markersize=8, markerfacecolor="none")
    axes.set_title(f"Validation, best {bits[best]:.3f}")
    _use_log_scale(axes, bits)


def _learning_rate(axes: Axes, curves: dict[str, Curve], names: dict[str, list[str]]) -> None:
    axes.plot(*curves["learning_rate"], color=GREEN)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    axes.set_ylim(bottom=0)


def _grad_norm(axes: Axes, curves: dict[str, Curve], names: dict[str, list[str]]) -> None:
    axes.plot(*curves["grad_norm"], color=PURPLE, linewidth=0.9, label="gradient norm")
    if skipped := curves["skipped"][0]:
        top = max(curves["grad_norm"][1])
        axes.plot(skipped, [top] * len(skipped), "x", color=RED, markersize=6, label="skipped step")
    _use_log_scale(axes, curves["grad_norm"][1])


def _throughput(axes: Axes, curves: dict[str, Curve], names: dict[str, list[str]]) -> None:
    tokens, speeds = curves["tokens_per_second"]
    axes.plot(tokens, speeds, color=YELLOW, linewidth=1, label="tokens per second")
    axes.yaxis.set_major_formatter(_count_text)
    axes.set_ylim(0, 1.15 * max(speeds))


def _sources(axes: Axes, curves: dict[str, Curve], names: dict[str, list[str]]) -> None:
    labels, named = zip(*_named(curves["source_tokens"], names["sources"]), strict=True)
    axes.stackplot(named[0][0], *(values for _, values in named), labels=labels, alpha=0.85, linewidth=0)
    axes.yaxis.set_major_formatter(_count_text)
    axes.legend(loc="upper left")


def _experts(axes: Axes, curves: dict[str, Curve], names: dict[str, list[str]]) -> None:
    for name, curve in _named(curves["expert_load"], names["layers"]):
        axes.plot(*curve, linewidth=1, label=name)
    axes.axhline(1.0, color=GREY, linewidth=0.8, linestyle=":", label="an even share")


_PANELS: dict[str, tuple[Callable[[Axes, dict[str, Curve], dict[str, list[str]]], None], str, str, str]] = {
    "loss": (_loss, "loss", "Loss", "nats per token"),
    "bits_per_byte": (_bits_per_byte, "valid_bits_per_byte", "Validation", "bits per byte of text"),
    "learning_rate": (_learning_rate, "learning_rate", "Learning rate", "learning rate"),
    "grad_norm": (_grad_norm, "grad_norm", "Gradient norm", "before clipping"),
    "throughput": (_throughput, "tokens_per_second", "Throughput", "tokens per second"),
    "sources": (_sources, "source_tokens", "Tokens by source", "tokens"),
    "experts": (_experts, "expert_load", "Busiest expert", "load over the mean"),
}
"""Each plot: its function, the number without which there is nothing to draw, its title, and the axis label."""


def _named(curve: Curve, names: Sequence[str], positions: Iterable[int] = ()) -> Iterator[tuple[str, Curve]]:
    """The curve of each place in a curve's lists, and its name: that at its position, or else its number."""
    for position, values in zip(positions or count(), zip(*curve[1], strict=True), strict=False):
        yield names[position] if position < len(names) else str(position + 1), (curve[0], list(values))


def _smoothed(values: Sequence[float]) -> list[float]:
    """An exponential moving average over a thirtieth of the curve; near its beginning over a tenth of what is past."""
    total = weight = 0.0
    averages = []
    for number, value in enumerate(values):
        keep = 1 - 1 / max(1.0, min(len(values) / 30, number / 10))
        total, weight = total * keep + value, weight * keep + 1
        averages.append(total / weight)
    return averages


def _use_log_scale(axes: Axes, values: Sequence[float]) -> None:
    """Use a logarithmic axis if values fall by a factor of three, with ticks labelled 2, 3, 5, and not 2 × 10⁰."""
    if not values or min(values) <= 0 or max(values) < 3 * min(values):
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0), numticks=8))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _count_text(value: float, _: object = None) -> str:
    """The label of a count: 0.5, 500, 2.5k, 10M, 1.5B."""
    return EngFormatter(sep="")(value).replace("G", "B") if abs(value) >= 1 else f"{value:g}"


if __name__ == "__main__":
    os.nice(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    draw(Path(sys.argv[1]))
