"""The measurements of `gpu.sh` as Markdown."""

from __future__ import annotations

import json
from typing import Any

NUM_KERNELS = 6
HEAD = (
    "measurement", "weights", "batch", "tokens/s", "MFU causal", "MFU palm", "idle", "peak memory",
    "plan: least to ample", "main memory", "start", "compiling", "second start", "save",
)  # fmt: skip


def lines_of(found: list[dict[str, Any]]) -> list[str]:
    """Device and versions, the table, each measurement's kernels, and what failed or was left out."""
    done = [one for one in found if "tokens_per_second" in one and "batch" in one]
    lines: list[str] = []
    for machine in dict.fromkeys(json.dumps([one["device"], one["versions"]]) for one in done):
        device, versions = json.loads(machine)
        lines += [f"{device}, " + ", ".join(f"{name} {version}" for name, version in versions.items()), ""]
    if done:
        lines += [f"| {' | '.join(HEAD)} |", "|---|" + "---:|" * (len(HEAD) - 1)]
        lines += [f"| {' | '.join(row(one))} |" for one in done]
    lines += [""] if done else []
    lines += [f"- {one['name']}: {one['summary']} ({one['seconds']:.0f} s)" for one in found if "summary" in one]
    lines += [f"- {one['name']}: left out, {one['left_out']}" for one in found if "left_out" in one]
    lines += [f"- {one['name']}: FAILED, {one['failed']}" for one in found if "failed" in one]
    for one in done:
        lines += ["", *details(one)]
    return lines


def row(one: dict[str, Any]) -> list[str]:
    """The cells of a measurement; what is not known is a dash."""
    shown = one.get("profile", {})
    return [
        one["name"],
        number(one.get("parameters"), 1e6, "M"),
        f"{one['batch']} {one['precision']}",
        number(one["tokens_per_second"], 1, ""),
        share(one["mfu_causal"]),
        share(one["mfu_palm"]),
        share(shown.get("idle")),
        number(one["memory_bytes"], 1e9, " GB", 1),
        f"{number(one['least_bytes'], 1e9, '', 1)} to {number(one['ample_bytes'], 1e9, ' GB', 1)}",
        number(one["host_bytes"], 1e9, " GB", 1),
        number(one["start_seconds"], 1, " s"),
        one["not_compiled"] or number(one["compile_seconds"], 1, " s"),
        number(one.get("second_start_seconds"), 1, " s"),
        one["save"] or "–",
    ]


def details(one: dict[str, Any]) -> list[str]:
    """How a measurement was made, and where its time goes."""
    settings = f" ({', '.join(one['settings'])})" if one["settings"] else ""
    loss = number(one["loss"], 1, "", 3)
    lines = [f"**{one['name']}**{settings}: {one['engine']}; {one['steps']} steps counted; last loss {loss}"]
    if shown := one.get("profile"):
        step = 1000 * shown["step_seconds"]
        kernels = [f"{took:.1f} ms ({took / step:.0%}) `{name[:90]}`" for name, took in shown["kernels"][:NUM_KERNELS]]
        parts = ", ".join(f"{name} {took:.1f} ms ({took / step:.0%})" for name, took in shown["parts"].items())
        lines += ["", f"A step of {step:.1f} ms: {parts}.", *(f"- {kernel}" for kernel in kernels)]
        lines += [
            f"- attention: {', '.join(f'`{name[:90]}`' for name in shown['attention']) or 'no kernel of that name'}"
        ]
    return lines


def number(value: float | None, unit: float, name: str, digits: int = 0) -> str:
    """A number in units of its own, or a dash."""
    return "–" if value is None else f"{value / unit:,.{digits}f}{name}"


def share(value: float | None) -> str:
    """A share in per cent, or n/a."""
    return "n/a" if value is None else f"{value:.1%}"
