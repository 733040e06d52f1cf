"""Step 3 on a GPU, measured: the parts of `benchmarks/gpu.sh`, but for `first`, which is in `first.py`.

Every number is of the command ``python -m zerokara.steps train`` on token files that step 2 made from random words, as
a user starts it: from its metrics.jsonl, from its log (the times at which lines come) and from a look at its memory.
The profile is of a second run of the same settings (`profile.py`), so that it costs the first nothing; that run finds
the compiled layers in torch's cache, as a user's second start does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.data import as_options, data_settings, make_data
from benchmarks.gpu.jobs import PARTS, RECIPE, SIZES, STEPS, TINY, TINY_NAMES, TINY_WORDS, WARM_UP_STEPS, WORDS, Job
from benchmarks.gpu.watch import Watched, watch
from zerokara.training.planning.processors import Devices

FILE_NAME = "measurements.jsonl"


def run_part(part: str, given: argparse.Namespace, folder: Path) -> list[str]:
    """Do one part within its minutes; return the names of what failed."""
    import torch

    if not torch.cuda.is_available() and not given.tiny:
        sys.exit("no GPU that torch can use; --tiny tries the program on a CPU")
    deadline = time.monotonic() + 60 * given.minutes - 15
    if part == "tests":
        found = run_tests(given, deadline, " or ".join(given.only), tell=print)
        add_line(given.results, {"name": free_name("tests", given.results), "part": part, **found})
        return ["tests"] if "failed" in found else []
    if not (folder / "50k").exists():
        make_data(folder / "50k", *(TINY_WORDS if given.tiny else WORDS)["50k"])
    failed = []
    for usual, job in PARTS[part].items():
        if usual not in (given.only or (TINY_NAMES if given.tiny else PARTS[part])):
            continue
        name = free_name("-".join([usual, *given.set]), given.results)
        left = deadline - time.monotonic()
        print(f"── {name}: {left:.0f} s are left", flush=True)
        if left < (0 if given.tiny else job.seconds):
            found = {"left_out": f"{left:.0f} s were left"}
        else:
            try:
                found = measure(name, job, given, folder, deadline)
            except Exception as error:  # whatever it is, the others are measured
                traceback.print_exc()
                found = {"failed": repr(error)}
        failed += [name] if "failed" in found else []
        add_line(given.results, {"name": name, "part": part, **found})
    return failed


def run_tests(
    given: argparse.Namespace,
    deadline: float,
    chosen: str = "",
    marked: str = "",
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """tests/gpu; with --tiny rehearsed on a CPU. Their output comes back as tests.txt."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=10", "tests/gpu"]
    marked = marked or ("not slow" if given.tiny else "")
    command += ["-m", marked] if marked else []
    command += ["-k", chosen] if chosen else []
    started, variables = time.monotonic(), {"ZEROKARA_REHEARSE_GPU_TESTS": "1"} if given.tiny else {}
    run = watch(command, "tests", given.results, deadline, variables, tell)
    lines = [f"$ {' '.join(command)}", *(line for _, line in run.lines)]
    with open(given.results / "tests.txt", "a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    found = {"summary": lines[-1], "seconds": time.monotonic() - started}
    return found | ({"failed": f"exit code {run.code}"} if run.code else {})


def settings_of(job: Job, given: argparse.Namespace, folder: Path) -> list[str]:
    """All settings of a measurement but its run folder; the last of two that set one key counts."""
    steps = WARM_UP_STEPS + 4 if given.tiny else STEPS  # profile.py needs seven
    common = [
        *data_settings(folder / job.vocabulary), "precision=bf16", f"max_steps={steps}", "epochs=10", "log_interval=1",
        "eval_interval=100000", "save_interval=100000", "eval_tokens=4096", "sample_prompts=[]",
        "plots=false", "tensorboard=false",
    ]  # fmt: skip
    chosen = [*common, *RECIPE, *SIZES[job.size], *(TINY if given.tiny else []), *job.settings, *given.set]
    return [f"{key}={value}" for key, value in dict(setting.split("=", 1) for setting in chosen).items()]


def measure(name: str, job: Job, given: argparse.Namespace, folder: Path, deadline: float) -> dict[str, Any]:
    """Train once as a user does, and once more under the profiler, for fewer steps."""
    cache = folder / f"compiled-{name}"
    found, run = watch_training(["-m", "zerokara.steps", "train"], name, job, given, folder, deadline, cache)
    if run.code:
        return found | {"failed": run.why()}
    again, profiled = watch_training(["-m", "benchmarks.gpu.profile"], name, job, given, folder, deadline, cache)
    if "profile" not in again:
        found["failed"] = f"the profile, with {profiled.why()}"
    return {**again, **found, "second_start_seconds": again["start_seconds"]}


def watch_training(
    program: list[str], name: str, job: Job, given: argparse.Namespace, folder: Path, deadline: float, cache: Path
) -> tuple[dict[str, Any], Watched]:
    """Train in a run folder of its own; return what is known, also where it failed, and what it printed.

    What torch compiles lies in `cache`: a start that finds it there does not compile.
    """
    run_dir = folder / "run"
    options = as_options([*settings_of(job, given, folder), f"output_model_dir={run_dir}"])
    try:
        # Before torch is loaded, as the launcher would set it.
        variables = Devices(gpu_names=("one",)).process_environment(1)
        variables = {name: value for name, value in variables.items() if name.startswith(("OMP", "PYTORCH", "TORCH"))}
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        run = watch([sys.executable, *program, *options], name, given.results, deadline, variables)
        found: dict[str, Any] = {"size": job.size, "settings": [*job.settings, *given.set]}
        for _, line in run.lines:
            found |= json.loads(line) if line.startswith('{"') else {}
        return found | facts_of(run, run_dir, found.get("profile", {}).get("first_step")), run
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


def facts_of(run: Watched, run_dir: Path, profiled_from: int | None = None) -> dict[str, Any]:
    """What metrics.jsonl and the log say of a run; steps under the profiler do not count."""
    from zerokara.training.monitoring import step_metrics

    steps = [line for line in step_metrics.read(run_dir) if "loss" in line]
    counted = [line for line in steps if WARM_UP_STEPS < line["step"] < (profiled_from or math.inf)]
    begun, compiled = run.seconds_to("compiling the layers"), run.seconds_to("compiled in")
    memory = [line["memory_bytes"] for line in steps]
    return {
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in counted) if counted else None,
        **{
            name: statistics.median(line[name] for line in counted) if counted and counted[0][name] else None
            for name in ("mfu_causal", "mfu_palm")
        },
        "steps": len(counted),
        "loss": steps[-1]["loss"] if steps else None,
        "memory_bytes": max(memory, default=None),
        "host_bytes": run.host_bytes,
        "start_seconds": run.seconds_to("ready after"),
        "compile_seconds": compiled - begun if begun is not None and compiled is not None else None,
        "not_compiled": run.told(r"not compiled, the layers run eagerly: (.*)"),
        "save": run.told(r"saved \S+ in (.*)"),
    }


def free_name(wanted: str, results: Path) -> str:
    """A name that no measurement in these results has."""
    taken = {line["name"] for line in read_lines(results)}
    names = itertools.chain([wanted], (f"{wanted}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def read_lines(results: Path) -> list[dict[str, Any]]:
    """All measurements in a folder."""
    path = results / FILE_NAME
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def add_line(results: Path, found: dict[str, Any]) -> None:
    """Add a measurement."""
    with open(results / FILE_NAME, "a", encoding="utf-8") as file:
        file.write(json.dumps(found, ensure_ascii=False) + "\n")
