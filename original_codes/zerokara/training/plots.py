"""Pictures of a run in its folder, for those who would rather look than read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerokara.training import metrics


def draw_loss(run_dir: Path) -> Path:
    """Draw training and validation loss over tokens, with the learning rate below, into ``plots/loss.png``."""
    from matplotlib.figure import Figure  # a Figure of its own needs no display and no global state

    lines = metrics.read(run_dir)
    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    tokens, losses = _series(lines, "loss")
    upper.plot(tokens, losses, label="training", color="#4477aa", linewidth=1.2)
    tokens, losses = _series(lines, "valid_loss")
    if tokens:
        upper.plot(tokens, losses, label="validation", color="#cc3311", marker="o", markersize=3, linewidth=1.2)
    upper.set_ylabel("loss (nats a token)")
    upper.legend()
    upper.grid(alpha=0.3)
    upper.set_title(run_dir.name)
    tokens, rates = _series(lines, "learning_rate")
    lower.plot(tokens, rates, color="#228833", linewidth=1.2)
    lower.set_ylabel("learning rate")
    lower.set_xlabel("tokens")
    lower.grid(alpha=0.3)
    path = run_dir / "plots" / "loss.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def _series(lines: list[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    chosen = [line for line in lines if key in line and "tokens" in line]
    return [line["tokens"] for line in chosen], [line[key] for line in chosen]
