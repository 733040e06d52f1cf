"""Step 3 on a GPU, measured: `benchmarks/gpu.sh` says what its parts are, and calls it.

Every number is of the command ``python -m zerokara.steps train`` on token files that step 2 made from random words, as
a user starts it: from its metrics.jsonl, from its log (the times at which lines come) and from a look at its memory.
What a profile shows is of a second run of the same settings (gpu_profile.py), so that it costs the first nothing; that
run finds the compiled layers in torch's cache, as a user's second start does.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import os
import queue
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "original_codes"), str(HERE)]  # gpu.sh leaves this folder out

# ruff: noqa: E402
from gpu_jobs import PARTS, RECIPE, SIZES, TINY, TINY_NAMES, Job

WARM_UP_STEPS = 3
"""They take memory and choose kernels, and do not count."""
STEPS = 13
FILE_NAME = "measurements.jsonl"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["tests", *PARTS, "all", "table"])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="for the table: further results")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of config.yaml")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="of the part, this measurement")
    given = parser.parse_args()
    failed: list[str] = []
    if given.part != "table":
        given.results.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            for part in ["tests", *PARTS] if given.part == "all" else [given.part]:
                failed += run_part(part, given, Path(folder))
    program = [sys.executable, str(HERE / "gpu_table.py"), *map(str, [given.results, *given.folders])]
    table = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    print(f"\n{table}", end="")
    if given.part != "table":
        (given.results / "table.md").write_text(table, encoding="utf-8")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run_part(part: str, given: argparse.Namespace, folder: Path) -> list[str]:
    """Do one part within its minutes; return the names of what failed."""
    import torch

    if not torch.cuda.is_available() and not given.tiny:
        sys.exit("no GPU that torch can use; --tiny tries the program on a CPU")
    deadline = time.monotonic() + 60 * given.minutes - 15
    if part == "tests":
        return [] if run_tests(given, deadline) else ["tests"]
    if not (folder / "corpus.jsonl").exists():
        make_data(folder, 500 if given.tiny else 49_000, 60 if given.tiny else 2_000)
    failed = []
    for usual, job in PARTS[part].items():
        if usual not in (given.only or (TINY_NAMES if given.tiny else PARTS[part])):
            continue
        name = free_name("-".join([usual, *given.set]), given.results)
        left = deadline - time.monotonic()
        print(f"── {name}: {left:.0f} s are left", flush=True)
        if left < (0 if given.tiny else job.seconds):
            found: dict[str, Any] = {"left_out": f"{left:.0f} s were left"}
        else:
            try:
                found = measure(name, job, given, folder, deadline)
            except Exception as error:  # whatever it is, the others are measured
                traceback.print_exc()
                found = {"failed": repr(error)}
        failed += [name] if "failed" in found else []
        add_line(given.results, {"name": name, "part": part, **found})
    return failed


def run_tests(given: argparse.Namespace, deadline: float) -> bool:
    """tests/gpu; with --tiny rehearsed on a CPU. Their output comes back as tests.txt."""
    folder = str(HERE.parent / "tests" / "gpu")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=10", folder]
    environment = dict(os.environ)
    if given.tiny:
        environment["ZEROKARA_REHEARSE_GPU_TESTS"] = "1"
        command += ["-m", "not slow"]
    command += ["-k", " or ".join(given.only)] if given.only else []
    print(f"── tests: {' '.join(command)}", flush=True)
    started, output = time.monotonic(), [f"$ {' '.join(command)}"]
    process = subprocess.Popen(
        command, cwd=HERE.parent, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    for line in lines_of(process, deadline):
        print(line, flush=True)
        output.append(line)
    code = process.wait()
    with open(given.results / "tests.txt", "a", encoding="utf-8") as file:
        file.write("\n".join(output) + "\n")
    found = {"name": free_name("tests", given.results), "part": "tests", "summary": output[-1]}
    found |= {"seconds": time.monotonic() - started} | ({"failed": f"exit code {code}"} if code else {})
    add_line(given.results, found)
    return code == 0


def make_data(folder: Path, num_words: int, num_documents: int) -> None:
    """Make a tokenizer with a piece for each of so many words, and token files of random ones, by step 2 itself."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as messages

    chance = random.Random(1)
    words = sorted({"".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(num_words)})
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(words[:2000]), model_prefix=str(folder / "small"), vocab_size=400, byte_fallback=True,
        unk_id=0, bos_id=1, eos_id=2, pad_id=3, add_dummy_prefix=False, remove_extra_whitespaces=False,
        user_defined_symbols=["\n"], normalization_rule_name="identity", minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    model = messages.ModelProto()
    model.ParseFromString((folder / "small.model").read_bytes())
    for word in words:
        model.pieces.add(piece=f"\u2581{word}", score=-1.0, type=messages.ModelProto.SentencePiece.NORMAL)
    for number in reversed(range(100)):
        model.pieces.add(piece=f"<extra_id_{number}>", score=0.0, type=messages.ModelProto.SentencePiece.CONTROL)
        model.trainer_spec.control_symbols.append(f"<extra_id_{number}>")
    model.trainer_spec.vocab_size = len(model.pieces)
    (folder / "tokenizer.model").write_bytes(model.SerializeToString(deterministic=True))
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as file:
        for _ in range(num_documents):
            file.write(json.dumps({"text": " " + " ".join(chance.choices(words, k=1000))}) + "\n")
    command = [sys.executable, "-m", "zerokara.steps", "tokenize", *as_options(data_settings(folder))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def data_settings(folder: Path) -> list[str]:
    """The settings of step 2, which step 3 has too."""
    return [
        f"input_jsonl=[{folder}/corpus.jsonl]",
        f"input_tokenizer_file={folder}/tokenizer.model",
        f"output_prefix={folder}/tokens",
        "valid_min_documents=1",
    ]


def as_options(settings: list[str]) -> list[str]:
    """As the command line has them."""
    return ["--config", "/dev/null", *(part for setting in settings for part in ("--set", setting))]


def settings_of(job: Job, given: argparse.Namespace, folder: Path) -> list[str]:
    """All settings of a measurement but its run folder; the last of two that set one key counts."""
    steps = WARM_UP_STEPS + 3 if given.tiny else STEPS  # gpu_profile.py needs six
    common = [
        *data_settings(folder), "precision=bf16", f"max_steps={steps}", "epochs=10", "log_interval=1",
        "eval_interval=100000", "save_interval=100000", "eval_tokens=4096", "sample_prompts=[]",
        "plots=false", "tensorboard=false",
    ]  # fmt: skip
    chosen = [*common, *RECIPE, *SIZES[job.size], *(TINY if given.tiny else []), *job.settings, *given.set]
    return [f"{key}={value}" for key, value in dict(setting.split("=", 1) for setting in chosen).items()]


def measure(name: str, job: Job, given: argparse.Namespace, folder: Path, deadline: float) -> dict[str, Any]:
    """Train once as a user does, and once more under the profiler."""
    settings, run_dir, cache = settings_of(job, given, folder), folder / "run", folder / f"compiled-{name}"
    command = [sys.executable, "-m", "zerokara.steps", "train", *as_options([*settings, f"output_model_dir={run_dir}"])]
    try:
        run = watch(command, name, given.results, cache, deadline)
        found = {"size": job.size, "settings": [*job.settings, *given.set], **versions(), **facts_of(run, run_dir)}
        found |= estimate(settings, run_dir)
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
    if run.code:
        return found | {"failed": f"exit code {run.code}: {' | '.join(line for _, line in run.lines[-3:])}"}
    report = folder / "profile.json"
    report.unlink(missing_ok=True)
    program = [sys.executable, str(HERE / "gpu_profile.py"), str(report)]
    try:
        options = as_options([*settings, f"output_model_dir={run_dir}"])
        profiled = watch([*program, *options], name, given.results, cache, deadline)
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
    if not report.exists():
        return found | {"failed": f"the profile, with exit code {profiled.code}"}
    second_start = profiled.seconds_to("ready after")
    return found | {"second_start_seconds": second_start, "profile": json.loads(report.read_text(encoding="utf-8"))}


class Watched(NamedTuple):
    """A command that has ended."""

    code: int
    lines: list[tuple[float, str]]
    """Seconds since its start, and what it printed."""
    host_bytes: int
    """Most that all its processes held of main memory at a time; what they share counts in each."""

    def seconds_to(self, text: str) -> float | None:
        """Seconds until the first line with this text."""
        return next((seconds for seconds, line in self.lines if text in line), None)

    def told(self, pattern: str) -> str | None:
        """Group 1 of the first line that has this pattern."""
        return next((match[1] for _, line in self.lines if (match := re.search(pattern, line))), None)


def watch(command: list[str], name: str, results: Path, cache: Path, deadline: float) -> Watched:
    """Run a command to its end, or to the deadline; its output goes into the log."""
    started, lines = time.monotonic(), []
    # What torch has compiled is this measurement's own: its first start compiles, its second does not.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    process = subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    peak = [0]
    threading.Thread(target=follow_memory, args=(process.pid, peak), daemon=True).start()
    with open(results / "log.txt", "a", encoding="utf-8") as log:
        log.write(f"── {name}: {' '.join(command)}\n")
        for line in lines_of(process, deadline):
            lines.append((time.monotonic() - started, line))
            log.write(f"{lines[-1][0]:7.1f}  {line}\n")
    return Watched(process.wait(), lines, peak[0])


def lines_of(process: subprocess.Popen[str], deadline: float) -> Iterator[str]:
    """Yield what a process prints, line by line; at the deadline it is killed with all that it started."""
    import psutil

    printed: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout or ():
            printed.put(line.rstrip("\n"))
        printed.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = printed.get(timeout=max(0.1, deadline - time.monotonic()))
        except queue.Empty:
            yield "killed: its time is over"
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            return
        if line is None:
            return
        yield line


def follow_memory(pid: int, peak: list[int]) -> None:
    """Keep the most main memory that a process and its children hold, until it ends."""
    import psutil

    while True:
        try:
            processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            held = sum(process.memory_info().rss for process in processes)
        except psutil.NoSuchProcess:
            if not psutil.pid_exists(pid):
                return
            continue
        peak[0] = max(peak[0], held)
        time.sleep(0.2)


def facts_of(run: Watched, run_dir: Path) -> dict[str, Any]:
    """What metrics.jsonl and the log say of a run."""
    from zerokara.training.monitoring import step_metrics

    steps = [line for line in step_metrics.read(run_dir) if "loss" in line]
    counted = [line for line in steps if line["step"] > WARM_UP_STEPS]
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
        "updater": run.told(r"(zerokara's own, not DeepSpeed's ZeRO|DeepSpeed's ZeRO, stage \d)"),
    }


def estimate(settings: list[str], run_dir: Path) -> dict[str, Any]:
    """What the plan foretells: parameters, and the memory where the run computes, at least and amply."""
    from dataclasses import replace

    import torch

    from zerokara.config.loading import load
    from zerokara.config.pretrain_config import PretrainConfig
    from zerokara.training.planning import processors
    from zerokara.training.planning.run_plan import make_plan

    config = load(PretrainConfig, "/dev/null", [*settings, f"output_model_dir={run_dir}"])
    devices = processors.devices()
    plan = replace(make_plan(config, 1), devices=devices).with_settings(precision=devices.precision(config))
    pool = plan.memory.pools[0]
    uncounted = sum(plan.memory.uncounted.values()) if torch.cuda.is_available() else 0  # memory_bytes is torch's own
    return {
        "parameters": plan.shape.num_parameters(),
        "batch": f"{config.global_batch_size // config.micro_batch} × {config.micro_batch} × {config.seq_len}",
        "precision": plan.resolved.precision,
        "least_bytes": int(pool.needed_bytes(1)) - uncounted,
        "ample_bytes": int(pool.needed_bytes()) - uncounted,
    }


def versions() -> dict[str, Any]:
    """The device, and what computes on it."""
    import torch

    found = {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "megatron-core")}
    return {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "versions": found}


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


if __name__ == "__main__":
    main()
