"""The test examples are read once, with the best checkpoint; a result of another one never passes for its."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from made_checkpoints import saved

from zerokara.checkpoint.folders import folder_of
from zerokara.config.finetune_config import FinetuneRunConfig
from zerokara.examples.example_files import ExampleFiles, SplitFiles
from zerokara.examples.facts import SplitCounts
from zerokara.finetuning import task
from zerokara.training.launching import Commands
from zerokara.training.planning.run_plan import RunPlan

COMMANDS = Commands("again", "next")


@pytest.fixture
def tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the checkpoints that were tested; each leaves a result."""
    names: list[str] = []

    def test(plan: RunPlan, work: str, folder: str) -> int:
        names.append(Path(folder).name)
        result = {"checkpoint": names[-1], "metric": plan.resolved.metric}  # type: ignore[attr-defined]
        result["test_sha256"] = examples.splits["test"].sha256
        (plan.run_dir / "test_result.json").write_text(json.dumps(result), encoding="utf-8")
        (plan.run_dir / "test_answers.jsonl").write_text(names[-1], encoding="utf-8")
        return 0

    split = SimpleNamespace(num_examples=3, sha256="first")
    examples = SimpleNamespace(splits={"test": split}, data_format="source_target")
    monkeypatch.setattr(task, "spawn", test)
    monkeypatch.setattr(task, "ExampleFiles", SimpleNamespace(read=lambda prefix: examples))
    monkeypatch.setattr(task, "_record", lambda *_: [])
    return names


def run(run_dir: Path, newest: int, best: int | None = None, metric: str = "chrf") -> None:
    for step in {newest, best or newest}:
        folder_of(run_dir, step).mkdir(exist_ok=True)
    if best:
        (run_dir / "best").write_text(f"global_step{best}\n", encoding="utf-8")
    plan: Any = SimpleNamespace(
        run_dir=run_dir, task=task.FINETUNING, resolved=FinetuneRunConfig(metric=metric, packed_length=8)
    )
    task.finish(cast(RunPlan, plan), COMMANDS, folder_of(run_dir, newest))


def test_it_is_the_best_once_and_an_earlier_result_is_kept(tmp_path: Path, tested: list[str]) -> None:
    run(tmp_path, newest=10)
    run(tmp_path, newest=40, best=20)
    run(tmp_path, newest=50, best=20)
    run(tmp_path, newest=50, best=20, metric="exact_match")
    assert tested == ["global_step10", "global_step20", "global_step20"]
    kept = sorted(path.name.split(".")[0] for path in tmp_path.glob("test_*.old-1"))
    names = [f"test_{kind}_global_step" for kind in ("answers", "result")]
    assert kept == [f"{name}{step}" for name in names for step in (10, 20)]
    assert (tmp_path / "test_answers.jsonl").read_text(encoding="utf-8") == "global_step20"


def test_other_test_examples_are_tested_with_the_same_checkpoint(tmp_path: Path, tested: list[str]) -> None:
    """A result never becomes that of examples which were not read."""
    run(tmp_path, newest=10)
    task.ExampleFiles.read("").splits["test"].sha256 = "second"  # type: ignore[misc]
    run(tmp_path, newest=20, best=10)
    run(tmp_path, newest=30, best=10)
    assert tested == ["global_step10", "global_step10"]


MIXED = ["bad", "good", "good"]


@pytest.mark.parametrize(
    ("first", "best", "test", "rivals"),
    [
        (0.0, 0.9, 1.0, []),
        (0.0, 0.9, 2 / 3, ["majority"]),
        (0.9, 0.9, 1.0, ["before the training"]),
        (0.5, 0.4, 1 / 3, ["0.3333 is not better than the 0.6667 by majority", "0.4000 is not better than the 0.5000"]),
        (0.0, 0.0, None, ["majority", "before the training"]),  # no test examples: those of the validation
        (0.1, 0.7, None, []),
        (None, None, None, []),  # nothing was held out
    ],
)
def test_a_result_that_beats_nothing_is_a_warning(
    tmp_path: Path, first: float | None, best: float | None, test: float | None, rivals: list[str]
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"input": "", "reference": each}) + "\n" for each in MIXED), encoding="utf-8")
    names = ["train", *(["valid"] if best is not None else []), *(["test"] if test is not None else [])]
    splits: Any = {name: SplitFiles(Path("p"), texts, SplitCounts(kept=3), "") for name in names}
    examples = ExampleFiles(splits, "text_label", "{input}", ["bad", "good"], None, [2])
    if test is not None:
        result = {"test_accuracy": test, "checkpoint": "global_step5", "test_examples": 7}
        (tmp_path / "test_result.json").write_text(json.dumps(result), encoding="utf-8")
    measured = {} if best is None else {"first_valid_accuracy": first, "best_selection_loss": -best}
    newest = saved(tmp_path, 5, facts={**measured, "init_from": "models/begun"})
    config, plan = (
        FinetuneRunConfig(metric="accuracy", packed_length=8, lr=2e-4),
        SimpleNamespace(run_dir=tmp_path, encoder=None),
    )
    for written, remedy in (("", "try a higher rate, --set lr=0.0006,"), ("lr", "leave lr at auto,")):
        plan.resolved, plan.reasons = config, {"epochs": "", "global_batch_size": "", "lr": ""}
        plan.reasons.pop(written, None)
        rows = task._record(cast(RunPlan, plan), config, examples, newest)
        assert test is None or "7 examples)" in dict(rows)["test"], "those of the test, whatever the split has now"
        made = json.loads((tmp_path / "finetune.json").read_bytes())
        assert made["init_from"] == "begun", "whatever the settings name by now"
        warnings = [text for name, text in rows if name == "warning"]
        assert len(warnings) == bool(rivals)
        assert not rivals or all(each in warnings[0] for each in [*rivals, remedy])
        assert not any("-0.0000" in text for text in warnings)
