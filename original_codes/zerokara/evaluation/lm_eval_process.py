"""The process that runs lm-evaluation-harness for one model: ``python -m … PARENT_PID REQUEST.json ANSWER.json``.

In: a `lm_eval.Request` as JSON. Out: the results by task with their number of examples, or what keeps a task from being
loaded. The only module that imports the harness; it needs the packages of requirements-lm-eval.lock.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from zerokara.durable import write_json
from zerokara.parent_death_signal import end_with_parent


def main(asked: Path, answered: Path) -> None:
    """Answer one request."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    request = json.loads(asked.read_text(encoding="utf-8"))
    manager = TaskManager()
    tasks, faults = _loaded(request["tasks"], manager)
    answer: dict[str, Any] = {"faults": faults}
    if not faults and not request["check_only"]:
        results: Any = simple_evaluate(
            model="hf",
            model_args={
                "pretrained": request["folder"],
                "dtype": request["dtype"],
                **({"prefix_token_id": request["start_id"]} if request["start_id"] is not None else {}),
            },
            tasks=tasks,
            device=request["device"],
            batch_size=request["batch_size"],
            limit=request["limit"],
            bootstrap_iters=1000,
            log_samples=True,
            task_manager=manager,
            random_seed=request["seed"],
            numpy_random_seed=request["seed"],
            torch_random_seed=request["seed"],
            fewshot_random_seed=request["seed"],
        )
        answer |= _answer(results)
    write_json(answered, answer)


def _loaded(names: list[str], manager: Any) -> tuple[list[Any], list[dict[str, str]]]:
    """The tasks with their data, and what is wrong with those that have none."""
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    tasks: list[Any] = []
    faults: list[dict[str, str]] = []
    started_in = Path.cwd()
    for name in names:
        path = Path(name)
        is_file = path.is_absolute()
        if not is_file and name not in manager.task_index:
            faults.append({"kind": "unknown", "task": name})
            continue
        os.chdir(path.parent if is_file else started_in)  # data files are named relative to the YAML
        try:
            tasks += manager.load([name])["tasks"].values()
        except (
            DatasetsError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
            ConnectionError,
            FileNotFoundError,
        ) as error:
            data = _data_of(path if is_file else manager.task_index[name].yaml_path)
            faults.append({"kind": "data", "task": name, "data": data, "error": str(error).strip().split("\n")[0]})
    os.chdir(started_in)
    return tasks, faults


def _data_of(path: Path | None) -> str:
    """The data set of a task, as arguments of `datasets.load_dataset`."""
    from lm_eval.tasks._yaml_loader import load_yaml

    settings = load_yaml(path, resolve_func=False) if path else {}
    given = [settings.get("dataset_path"), settings.get("dataset_name")]
    further = [f"{key}={value!r}" for key, value in (settings.get("dataset_kwargs") or {}).items()]
    return ", ".join([*(repr(each) for each in given if each), *further]) or "which its code names"


def _answer(results: Any) -> dict[str, Any]:
    counts = {task: number["effective"] for task, number in results["n-samples"].items()}
    numbers = {
        task: {key: value for key, value in values.items() if isinstance(value, int | float)}
        for task, values in results["results"].items()
    }
    facts = {
        task: {
            key: settings[key]
            for key in ("output_type", "num_fewshot", "dataset_path")
            if isinstance(settings.get(key), str | int)
        }
        for task, settings in results["configs"].items()
    }
    samples: dict[str, dict[str, dict[str, float]]] = {}
    for task, each in results.get("samples", {}).items():
        for sample in each:
            for metric in sample["metrics"]:
                if isinstance(value := sample[metric], int | float):
                    by_document = samples.setdefault(task, {}).setdefault(f"{metric},{sample['filter']}", {})
                    by_document[str(sample["doc_id"])] = float(value)
    return {
        "results": numbers,
        "samples": samples,
        "higher_is_better": results["higher_is_better"],
        "counts": counts,
        "facts": facts,
        "version": results["lm_eval_version"],
    }


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    main(Path(sys.argv[2]), Path(sys.argv[3]))
