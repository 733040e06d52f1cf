"""Tasks of lm-evaluation-harness (0.4.13), in a process of its own, without network.

In: Hugging Face folders, and tasks: the path of a task's YAML file, a folder of such files, or the name of a task that
comes with the harness. Out: a `Section` for each metric of each task.

The harness has a lock file of its own and is no part of what zerokara needs, so it is never imported here:
`lm_eval_process` runs it, and is asked and answers by JSON files. It is given no network: the data of a task are local
files, named in its YAML relative to the folder of the YAML (``dataset_path: json``, ``dataset_kwargs: {data_files:
{test: questions.jsonl}}``), or lie in the cache of Hugging Face. Its numbers are its own, and so are their standard
errors, of which the intervals are made (mean ± 1.96 standard errors).

Code that a task's YAML names (``!function``) is run: use YAML files that you trust.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import combinations
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from zerokara import hashing
from zerokara.durable import write_json
from zerokara.errors import Fault, RunError, UserError
from zerokara.evaluation import cache as kept
from zerokara.evaluation.intervals import LEVEL, Interval, percent, wilson
from zerokara.evaluation.measures import Measure, share
from zerokara.evaluation.results import PairedDifference, Row, Section
from zerokara.progress import log

if TYPE_CHECKING:
    from zerokara.evaluation.models import LoadedModel

KEY = "lm_eval_tasks"
INSTALL = ".venv/bin/pip install --require-hashes --no-deps -r requirements-lm-eval.lock"
_PROPORTIONS = {"acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match"}
"""Metrics that are the share of examples that are right; shown in per cent, with Wilson's interval. All others stand as
the harness gives them."""
_SAME = 1e-9
"""Most by which the mean of the values differs from the harness's number."""
_FILES = (".yaml", ".yml", ".py", ".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt")
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclass(frozen=True)
class Request:
    """What the process is asked to do."""

    folder: str
    """The model, as an absolute path."""
    tasks: tuple[str, ...]
    """Absolute paths of YAML files, or names of tasks of the harness."""
    start_id: int | None
    """The token before a text that has no context; None for the harness's choice: bos, or else eos."""
    device: str
    dtype: str
    limit: int | None
    """Examples of each task; None for all."""
    seed: int
    batch_size: int = 8
    check_only: bool = False
    """Whether only to load the tasks with their data."""


def check(tasks: Sequence[str], where: str) -> tuple[tuple[str, ...], list[Fault]]:
    """Return the tasks as the process takes them: absolute paths of YAML files, and names; and what is wrong.

    Faults are a harness that is not installed, and paths that hold no task.
    """
    faults = []
    try:
        metadata.version("lm-eval")
    except metadata.PackageNotFoundError:
        rule = "needs lm-evaluation-harness, which is not installed"
        faults.append(Fault(where, rule, KEY, remedy=f"install it beside the rest: {INSTALL}"))
    found: list[str] = []
    for task in tasks:
        path = Path(task).expanduser()
        if path.is_dir():
            files = [str(file.absolute()) for file in sorted(path.glob("*.yaml")) if not file.name.startswith("_")]
            found += files
            if not files:
                faults.append(Fault(where, "is a folder without the .yaml file of a task", KEY, task))
        elif path.is_file():
            found.append(str(path.absolute()))
        elif "/" in task or path.suffix in (".yaml", ".yml"):
            faults.append(
                Fault(where, "there is no such file", KEY, task, "give a YAML file, a folder or a task's name")
            )
        else:
            found.append(task)
    return tuple(found), faults


def files(tasks: Sequence[str]) -> list[Path]:
    """The files that local tasks are made of, as far as their folders hold them: settings, code and data."""
    folders = {Path(task).parent for task in check(tasks, "")[0] if Path(task).is_absolute()}
    return sorted(file for folder in folders for file in folder.iterdir() if file.suffix in _FILES and file.is_file())


def check_data(tasks: Sequence[str], where: str) -> None:
    """Load the tasks with their data, so that what is wrong with them is told before models are measured.

    Raises:
        UserError: a task is unknown, or its data are not on this machine.
        RunError: the harness failed.
    """
    run(Request("", check(tasks, where)[0], None, "cpu", "float32", None, 0, check_only=True), where)


def measure(
    models: Sequence[LoadedModel],
    tasks: Sequence[str],
    where: str,
    limit: int | None,
    seed: int,
    cache: Path | None = None,
) -> list[Section]:
    """Run the harness on each model, one process after the other; `limit` is the examples of each task, None for all.

    An encoder-decoder is asked too, as far as the harness can: tasks that compare texts, not rolling likelihoods. In
    `cache` the answers of a model to all the tasks stay, by content.

    Raises:
        UserError: a task is unknown, or its data are not on this machine.
        RunError: the harness failed.
    """
    from zerokara.evaluation import bits_per_byte  # torch: only once the configuration has been checked

    found, _ = check(tasks, where)
    hashes = hashing.hash_files(files(tasks))
    what = [metadata.version("lm-eval"), [Path(task).name for task in found], sorted(hashes.values()), limit, seed]
    answers = {}
    for model in models:
        model.release()  # the process loads them for itself
    for model in models:
        log(f"lm-evaluation-harness: {model.name}")
        # The harness would take a bos that the model has never seen.
        reading = bits_per_byte.reading_of(model, bits_per_byte.Settings())
        start_id = None if isinstance(reading, str) else reading.start_id
        dtype = str(model.dtype).removeprefix("torch.")
        folder = kept.folder_of(cache, model.content, dtype, start_id, *what)
        answer = kept.read(folder, 0, 1, _only)
        if answer is None:
            folder_of_model = str(model.folder.absolute())
            answer = run(Request(folder_of_model, found, start_id, str(model.device), dtype, limit, seed), where)
            kept.write(folder, 0, {"answers": [answer]})
        answers[model.name] = answer
    return sections(answers, seed)


def _only(answers: list[dict[str, Any]]) -> dict[str, Any]:
    return answers[0]


def run(request: Request, where: str) -> dict[str, Any]:
    """Run the harness on one model; return its results by task.

    Raises:
        UserError: a task is unknown, or its data are not on this machine.
        RunError: the harness failed.
    """
    with tempfile.TemporaryDirectory(prefix="zerokara-lm-eval-") as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
        write_json(asked, asdict(request))
        # It finds its modules where this process does.
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, **_OFFLINE, "PYTHONPATH": path, "LMEVAL_LOG_LEVEL": "ERROR"}
        # -P: a file of the folder from which the step was started is not taken for a package of the harness.
        command = [sys.executable, "-P", "-m", "zerokara.evaluation.lm_eval_process", str(os.getpid())]
        command += [str(asked), str(answered)]
        done = subprocess.run(command, env=environment, check=False)
        if done.returncode or not answered.is_file():
            raise RunError(f"lm-evaluation-harness ended with exit code {done.returncode}; its last lines are above")
        answer: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
    if answer["faults"]:
        raise UserError([_fault(fault, where) for fault in answer["faults"]])
    return answer


def _fault(fault: Mapping[str, str], where: str) -> Fault:
    if fault["kind"] == "unknown":
        remedy = "python -m lm_eval ls tasks shows the names that it knows; a file of your own needs its path"
        return Fault(where, "is no task of lm-evaluation-harness", KEY, fault["task"], remedy)
    data = fault["data"]
    fetch = f'.venv/bin/python -c "import datasets; datasets.load_dataset({data})"'
    remedy = f"fetch them once, where there is a network ({fetch}), or name local files in a YAML of your own"
    rule = f"its data, {data}, are not on this machine, and evaluation uses no network ({fault['error']})"
    return Fault(where, rule, KEY, fault["task"], remedy)


def sections(answers: Mapping[str, Mapping[str, Any]], seed: int = 0) -> list[Section]:
    """Make a section of each metric of each task from the answers by model.

    Models are compared document by document where the metric is the mean of one value for each.
    """
    found: dict[tuple[str, str], list[Row]] = {}
    kinds: dict[tuple[str, str], tuple[str, bool]] = {}
    facts: dict[str, dict[str, Any]] = {}
    measures: dict[tuple[str, str], dict[str, tuple[list[str], Measure]]] = {}
    for model, answer in answers.items():
        for task, numbers in answer["results"].items():
            facts[task] = {"task": task, "lm_eval": answer["version"], **answer["facts"].get(task, {})}
            for metric, is_higher_better in answer["higher_is_better"].get(task, {}).items():
                for name, filter_name, value, error in _values(numbers, metric):
                    key = (task, name)
                    kinds[key] = metric, is_higher_better is not False
                    found.setdefault(key, []).append(_row(model, metric, value, error, answer["counts"].get(task, 0)))
                    samples = answer.get("samples", {}).get(task, {}).get(f"{metric},{filter_name}", {})
                    scale = 100 if metric in _PROPORTIONS else 1
                    documents = sorted(samples)
                    measure = share(name, [scale * samples[each] for each in documents], [1] * len(samples))
                    if abs(measure.value - scale * value) < scale * _SAME:  # else it is no mean over documents
                        measures.setdefault(key, {})[model] = documents, measure
    return [
        Section(
            name=f"lm-eval: {task}, {metric}",
            metric=metric,
            unit="%" if base in _PROPORTIONS else "bits/byte" if base == "bits_per_byte" else "",
            higher_is_better=is_higher_better,
            rows=tuple(each),
            differences=tuple(_differences(measures.get((task, metric), {}), seed)),
            facts=facts[task],
            digits=1 if base in _PROPORTIONS else 4,
        )
        for (task, metric), each in found.items()
        for base, is_higher_better in [kinds[task, metric]]
    ]


def _differences(measures: Mapping[str, tuple[list[str], Measure]], seed: int) -> Iterator[PairedDifference]:
    """Of every two models whose values are of the same documents."""
    for (a, (documents, one)), (b, (others, other)) in combinations(measures.items(), 2):
        if documents == others:
            yield PairedDifference(a, b, one.value - other.value, one.difference(other, seed))


def _values(numbers: Mapping[str, Any], metric: str) -> list[tuple[str, str, float, float | None]]:
    """Name, filter, value and standard error of a metric, once for each of the task's filters (``acc,none``)."""
    found = []
    for key, value in numbers.items():
        name, _, filter_name = key.partition(",")
        if name == metric and isinstance(value, int | float):
            error = numbers.get(f"{metric}_stderr,{filter_name}")
            shown = metric if filter_name in ("none", "") else f"{metric}_{filter_name}"
            found.append((shown, filter_name, float(value), float(error) if isinstance(error, int | float) else None))
    return found


def _row(model: str, metric: str, value: float, error: float | None, count: int) -> Row:
    scale, interval = 100 if metric in _PROPORTIONS else 1, None
    if metric in _PROPORTIONS and count:
        interval = wilson(round(value * count), count)
    elif error is not None:
        half = NormalDist().inv_cdf((1 + LEVEL) / 2) * error
        interval = Interval(value - half, value + half)
    return Row(model, scale * value, percent(interval) if scale == 100 else interval, count)
