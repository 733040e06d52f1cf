"""lm-evaluation-harness in its process: with a stand-in for the harness, and with itself where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zerokara.errors import RunError, UserError
from zerokara.evaluation import lm_eval
from zerokara.evaluation.lm_eval import Request

WHERE = "evaluate_config.yaml:9"
STAND_IN = {
    "lm_eval/__init__.py": """
import os
def simple_evaluate(model, model_args, tasks, limit, **others):
    if limit == 13:
        raise SystemExit(3)
    assert os.environ["HF_HUB_OFFLINE"] == os.environ["HF_DATASETS_OFFLINE"] == "1"
    numbers = {"alias": "x", "acc,none": 0.75, "acc_stderr,none": "N/A"}
    return {
        "results": {task: numbers for task in tasks}, "higher_is_better": {task: {"acc": True} for task in tasks},
        "n-samples": {task: {"original": 9, "effective": 8} for task in tasks}, "lm_eval_version": "0",
        "samples": {task: [
            {"doc_id": n, "filter": "none", "metrics": ["acc"], "acc": float(n < 6)} for n in range(8)
        ] for task in tasks},
        "configs": {task: {"output_type": str(model_args), "doc_to_text": print} for task in tasks},
    }
""",
    "lm_eval/tasks/__init__.py": """
import os, types
class TaskManager:
    task_index = {"known": None, "far": types.SimpleNamespace(yaml_path="far.yaml")}
    def load(self, names):
        if names == ["far"]:
            raise ConnectionError("no network\\nmore")
        return {"tasks": {name: f"{os.path.basename(os.getcwd())}:{name.rpartition('/')[2]}" for name in names}}
""",
    "lm_eval/tasks/_yaml_loader.py": """
def load_yaml(path, resolve_func):
    return {"dataset_path": "someone/far", "dataset_kwargs": {"revision": "1"}}
""",
    "datasets/__init__.py": "",
    "datasets/exceptions.py": "class DatasetsError(Exception): pass",
}


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, source in STAND_IN.items():
        (tmp_path / "packages" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "packages" / name).write_text(source, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packages"), *sys.path])
    return tmp_path


def request_of(*tasks: str, limit: int | None = None) -> Request:
    return Request("/models/a", tasks, 7, "cpu", "float32", limit, 1)


def test_a_run_answers_by_task(stand_in: Path) -> None:
    own = stand_in / "mine"
    own.mkdir()
    (own / "task.yaml").write_text("task: mine\n", encoding="utf-8")
    answer = lm_eval.run(request_of("known", str(own / "task.yaml")), WHERE)
    here = Path.cwd().name
    assert list(answer["results"]) == [f"{here}:known", "mine:task.yaml"], "data files are relative to the YAML"
    (section, _) = lm_eval.sections({"a": answer, "b": answer})
    assert [each.difference for each in section.differences] == [0.0]
    assert (section.metric, section.unit, section.higher_is_better) == ("acc", "%", True)
    row, _ = section.rows
    assert (row.model, row.value, row.n) == ("a", 75.0, 8) and row.interval is not None
    assert row.interval.low == pytest.approx(40.9, abs=0.1) and row.interval.high == pytest.approx(92.9, abs=0.1)
    assert "'prefix_token_id': 7" in section.facts["output_type"] and "'pretrained': '/models/a'" in str(section.facts)


def test_tasks_that_are_not_there_are_told_at_once(stand_in: Path) -> None:
    with pytest.raises(UserError) as error:
        lm_eval.run(request_of("nosuch", "far", "known"), WHERE)
    unknown, far = error.value.faults
    assert unknown.value == "nosuch" and unknown.where == far.where == WHERE
    assert far.value == "far" and "'someone/far', revision='1'" in far.remedy and "no network" in far.rule


def test_models_are_compared_by_document_where_the_metric_is_a_mean(tmp_path: Path) -> None:
    def answer(values: list[float], f1: float = 0.5, first: int = 0) -> dict[str, Any]:
        samples = {str(number): value for number, value in enumerate(values, first)}
        return {
            "results": {"t": {"acc,none": sum(values) / len(values), "f1,none": f1}},
            "samples": {"t": {"acc,none": samples, "f1,none": samples}}, "counts": {"t": len(values)},
            "higher_is_better": {"t": {"acc": True, "f1": True}}, "facts": {}, "version": "0",
        }  # fmt: skip

    one, other = answer([1.0] * 30 + [0.0] * 10, f1=0.1), answer([1.0] * 20 + [0.0] * 20, f1=0.2)
    acc, f1 = lm_eval.sections({"a": one, "b": other, "of others": answer([1.0, 0.0] * 20, first=1)})
    (difference,) = acc.differences
    assert (difference.a, difference.b, difference.difference) == ("a", "b", 25.0) and not f1.differences
    assert difference.interval is not None and 10 < difference.interval.low < 25 < difference.interval.high < 45


def test_the_files_of_a_local_task_are_its_folders(tmp_path: Path) -> None:
    for name in ("task.yaml", "code.py", "data.jsonl", "notes.md"):
        (tmp_path / name).touch()
    found = lm_eval.files([str(tmp_path / "task.yaml"), str(tmp_path), "arc_easy"])
    assert [path.name for path in found] == ["code.py", "data.jsonl", "task.yaml"]


def test_answers_are_kept_by_content(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0" if name == "lm-eval" else installed(name))
    (stand_in / "task").mkdir()
    (stand_in / "task" / "task.yaml").write_text("task: mine\n", encoding="utf-8")
    asked: list[Request] = []
    run = lm_eval.run

    def counts(request: Request, where: str) -> dict[str, Any]:
        asked.append(request)
        return run(request, where)

    monkeypatch.setattr(lm_eval, "run", counts)
    model: Any = SimpleNamespace(
        name="a", folder=stand_in, content="1", dtype="torch.float32", device="cpu", release=lambda: None,
        context_length=8, tokenizer=Tokens(),
    )  # fmt: skip
    for times in (1, 1, 2):
        if times == 2:
            (stand_in / "task" / "questions.jsonl").write_text("{}\n", encoding="utf-8")
        (section,) = lm_eval.measure([model], [str(stand_in / "task")], WHERE, None, 1, stand_in / "cache")
        assert section.rows[0].value == 75.0 and len(asked) == times
    assert asked[0].start_id == 3


class Tokens:
    """A tokenizer with an end token only."""

    bos_token_id, eos_token_id = None, 3

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [5]}

    def convert_ids_to_tokens(self, number: int) -> str:
        return "</s>"


def test_data_are_checked_without_a_model(stand_in: Path) -> None:
    lm_eval.check_data(["known"], WHERE)
    answer = lm_eval.run(replace(request_of("known", limit=13), check_only=True), WHERE)
    assert answer == {"faults": []}, "the stand-in would have ended with 3"
    with pytest.raises(UserError, match="far"):
        lm_eval.check_data(["far"], WHERE)


def test_it_ends_with_the_process_that_started_it(stand_in: Path) -> None:
    (stand_in / "request.json").write_text(json.dumps(asdict(request_of("known"))), encoding="utf-8")
    nobody = str(2**22 + 1)  # beyond the largest process id of Linux: such a parent is dead
    command = [sys.executable, "-m", "zerokara.evaluation.lm_eval_process", nobody]
    answered = stand_in / "answer.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command += [str(stand_in / "request.json"), str(answered)]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (1, b"") and not answered.exists()


def test_a_harness_that_fails_is_no_result(stand_in: Path) -> None:
    with pytest.raises(RunError, match="exit code 3"):
        lm_eval.run(request_of("known", limit=13), WHERE)


def test_tasks_are_checked_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.yaml", "a.yaml", "_shared.yaml", "data.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(metadata, "version", lambda _: "0.4.13")
    expected = (str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"), "arc_easy")
    assert lm_eval.check([str(tmp_path), "arc_easy"], WHERE) == (expected, [])

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    _, faults = lm_eval.check([str(tmp_path / "no.yaml"), str(tmp_path / "empty"), str(tmp_path)], WHERE)
    absent, file, folder = faults
    assert lm_eval.INSTALL in absent.remedy and file.value == str(tmp_path / "no.yaml")
    assert folder.value == str(tmp_path / "empty")


def test_other_metrics_keep_the_units_of_the_harness() -> None:
    answer = {
        "results": {"t": {"f1,none": 0.5, "f1_stderr,none": 0.1, "exact_match,strict": 1.0, "bits_per_byte,none": 2.5}},
        "higher_is_better": {"t": {"f1": True, "exact_match": True, "bits_per_byte": False}},
        "counts": {"t": 4}, "facts": {}, "version": "0.4.13",
    }  # fmt: skip
    f1, exact, bits = lm_eval.sections({"a": answer})
    assert f1.rows[0].value == 0.5 and f1.rows[0].interval is not None and f1.unit == ""
    assert f1.rows[0].interval.low == pytest.approx(0.5 - 0.196, abs=1e-3)
    assert (exact.metric, exact.unit, exact.rows[0].value) == ("exact_match_strict", "%", 100.0)
    assert exact.rows[0].interval is not None and exact.rows[0].interval.low < 60
    assert (bits.unit, bits.higher_is_better, bits.rows[0].interval) == ("bits/byte", False, None)
    assert [each.name for each in (f1, exact, bits)] == [f"lm-eval: t, {each.metric}" for each in (f1, exact, bits)]


def test_a_share_is_per_cent_under_each_filter_and_without_a_count() -> None:
    numbers = {"acc_bytes,none": 0.75, "acc,strict": 0.5, "acc_stderr,strict": 0.05, "accuracy_of_mine,none": 0.25}
    better = dict.fromkeys(("acc_bytes", "acc", "accuracy_of_mine"), True)
    answer = {"results": {"t": numbers}, "higher_is_better": {"t": better}, "counts": {}, "facts": {}, "version": "0"}
    found = {each.metric: (each.unit, each.rows[0].value) for each in lm_eval.sections({"a": answer})}
    assert found == {"acc_bytes": ("%", 75.0), "acc_strict": ("%", 50.0), "accuracy_of_mine": ("", 0.25)}
    interval = lm_eval.sections({"a": answer})[1].rows[0].interval
    assert interval is not None and interval.low == pytest.approx(50 - 9.8, abs=0.01)


def test_the_lock_adds_to_requirements_and_changes_nothing(root: Path) -> None:
    def pins(name: str) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for line in (root / name).read_text(encoding="utf-8").splitlines():
            if line and line[0].isalnum():
                package, _, version = line.split()[0].partition("==")
                found.setdefault(package.partition("[")[0], set()).add(version)
        return found

    base, further = pins("requirements.lock"), pins("requirements-lm-eval.lock")
    assert further["lm-eval"] == {"0.4.13"} and "torch" not in further
    shared = base.keys() & further.keys()
    assert {"transformers", "numpy", "tokenizers", "huggingface-hub"} <= shared
    assert {name: further[name] for name in shared} == {name: base[name] for name in shared}


@pytest.mark.skipif(
    util.find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed: " + lm_eval.INSTALL
)
def test_its_bits_per_byte_are_ours(tmp_path: Path) -> None:
    """On documents that fit into the context, since its windows do not overlap; and not with another start token."""
    from made_models import causal_model, spaced, unspaced

    from zerokara.evaluation import bits_per_byte, models
    from zerokara.evaluation.texts import MeasuredText

    documents = tuple(spaced()[:12] + unspaced()[:8])
    causal_model(documents, tmp_path / "model")
    lines = (json.dumps({"text": document}, ensure_ascii=False) + "\n" for document in documents)
    (tmp_path / "text.jsonl").write_text("".join(lines), encoding="utf-8")
    task = {
        "task": "text", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "text.jsonl"}},
        "test_split": "test", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }  # fmt: skip
    (tmp_path / "text.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    (model,) = models.open_models([tmp_path / "model"], "cpu", "fp32")
    settings = bits_per_byte.Settings()
    (row,) = bits_per_byte.measure([model], MeasuredText("text", documents, len(documents)), settings).rows
    reading = bits_per_byte.reading_of(model, settings)
    assert not isinstance(reading, str) and row.value is not None

    def theirs(start_id: int) -> Any:
        request = Request(str(tmp_path / "model"), (str(tmp_path / "text.yaml"),), start_id, "cpu", "float32", None, 1)
        (section,) = lm_eval.sections({"a": lm_eval.run(request, WHERE)})
        return section.rows[0].value

    (section,) = lm_eval.measure([model], [str(tmp_path / "text.yaml")], WHERE, None, 1)
    assert section.rows[0].value == pytest.approx(row.value, abs=1e-3)
    assert abs(theirs(reading.start_id + 9) - row.value) > 2e-3
