"""`gpu.sh first`: what is wanted first of a GPU, in one call of nine minutes: a JSON object a line, as each is found.

| job | facts |
|---|---|
| `machine`, `attention` | what `facts.py` tells; the first line says which torch |
| `kernels` | what `kernels.py` tells: which kernels are right |
| `data` | none: token files of random words, for two vocabularies |
| `tests` | tests/gpu without the slow ones |
| those of `jobs.FIRST` | speed, memory, the parts of a step and its kernels, of a training that saves nothing |
| at last | what was measured beside what `benchmarks/gpu/simulation` has predicted |

Each is a process of its own with a time limit of its own: its planned end, so that what one leaves over is the next
one's, and a job that hangs costs the others nothing. The plan takes less than the call. A job that fails says so in a
line, and the others go on; what no longer fits is left out, with a line that says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import FACTS, FIRST, FIRST_SECONDS, TINY_FIRST, TINY_TESTS, TINY_WORDS, WORDS
from benchmarks.gpu.measure import add_line, free_name, run_tests, watch_training
from benchmarks.gpu.predictions import compared
from benchmarks.gpu.watch import watch

PART = "first"
PLAN = FACTS | {name: job.seconds for name, job in FIRST.items()}
"""Seconds of each job, in the order in which they are done."""
Tell = Callable[[dict[str, Any]], None]


def run(given: argparse.Namespace, folder: Path) -> list[str]:
    """Do all jobs, or those that are named; return the names of what failed. `folder` is for what is not kept."""
    started = time.monotonic()
    deadline = started + 60 * given.minutes - (FIRST_SECONDS - sum(PLAN.values()))
    chosen = given.only or [*FACTS, *(TINY_FIRST if given.tiny else FIRST)]
    end, failed, left_out = started, list[str](), list[str]()
    measured: dict[str, dict[str, Any]] = {}
    for usual in (name for name in PLAN if name in chosen):
        name, now = (
            free_name("-".join([usual, *given.set]) if usual in FIRST else usual, given.results),
            time.monotonic(),
        )
        end += PLAN[usual]

        def tell(fact: dict[str, Any], name: str = name) -> None:
            line = {"name": name, "part": PART, **fact}
            print(json.dumps(line, ensure_ascii=False), flush=True)
            add_line(given.results, line)
            if "failed" in fact:
                failed.append(name)
            if fact.get("device") == "cpu" and not given.tiny:
                sys.exit("no GPU that torch can use; --tiny tries the program on a CPU")

        if deadline - now < PLAN[usual] and not given.tiny:
            left_out.append(name)
            tell({"left_out": f"{deadline - now:.0f} s were left, and {PLAN[usual]:.0f} s are planned"})
            continue
        try:
            done = do(usual, name, given, folder, min(end, deadline) if not given.tiny else now + 120, tell)
        except Exception as error:  # whatever it is, the others are done
            done = {"failed": repr(error)}
        if "profile" in done and not given.set:  # which the prediction does not know
            measured[usual] = done
        tell(done | {"seconds": round(time.monotonic() - now, 1)})
    table = [*compared(measured)]
    (given.results / "comparison.md").write_text("\n".join(table) + "\n", encoding="utf-8")
    print(json.dumps({"name": "comparison", "part": PART, "table": table}, ensure_ascii=False), flush=True)
    planned, took = sum(PLAN.values()), round(time.monotonic() - started, 1)
    print(json.dumps({"name": PART, "seconds": took, "planned": planned, "failed": failed, "left_out": left_out}))
    return failed


def do(job: str, name: str, given: argparse.Namespace, folder: Path, deadline: float, tell: Tell) -> dict[str, Any]:
    """Do one job until the deadline; return its last fact."""
    tiny = ["--tiny"] if given.tiny else []
    if job in FIRST:
        program = ["-m", "benchmarks.gpu.profile"]
        cache = folder / "compiled"  # one for all: layers of a size are equal
        found, watched = watch_training(program, name, FIRST[job], given, folder, deadline, cache)
        return found | ({} if "profile" in found else {"failed": watched.why()})
    if job == "tests":
        if importlib.util.find_spec("pytest") is None:
            return {"left_out": "pytest is not installed"}
        return run_tests(given, deadline, TINY_TESTS if given.tiny else "", "not slow")
    if job == "data":
        sizes = [(words, *numbers) for words, numbers in (TINY_WORDS if given.tiny else WORDS).items()]
        commands = [["data", str(folder / words), *map(str, numbers)] for words, *numbers in sizes]
    else:
        commands = [["kernels", *tiny] if job == "kernels" else ["facts", job, *tiny]]
    for module, *arguments in commands:
        command = [sys.executable, "-m", f"benchmarks.gpu.{module}", *arguments]

        def pass_on(line: str) -> None:
            if line.startswith('{"'):
                tell(json.loads(line))

        watched = watch(command, name, given.results, deadline, tell=pass_on)
        if watched.code:
            return {"failed": watched.why()}
    return {}
