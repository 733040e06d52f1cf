"""Models answer the tasks of a configuration; what they answered before is kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from zerokara.config.evaluate_config import TaskSettings
from zerokara.config.loading import load
from zerokara.evaluation import answers, tasks
from zerokara.evaluation import cache as kept
from zerokara.evaluation import inputs as task_data
from zerokara.evaluation.answers import Answers
from zerokara.evaluation.overlap import Overlap


class Parrot:
    """A model that always says the same; its weights are counted when they are asked for."""

    def __init__(self, name: str, says: str, log: list[str], content: str = "") -> None:
        self.name, self.says, self.content, self.dtype, self._log = name, says, content or name, "fp32", log
        self.tokenizer, self.is_encoder_decoder = lambda text, **_: {"input_ids": list(text)}, False

    @property
    def model(self) -> Any:
        self._log.append(self.name)
        return self


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskSettings:
    def answer(model: Parrot, tokenizer: Any, prompts: Sequence[Any], *, max_new_tokens: int, label: str) -> Answers:
        return Answers([model.says] * len(prompts), [True] * len(prompts), max_new_tokens)

    monkeypatch.setattr(answers, "answer", answer)
    lines = "".join(f"text {number}\t{number % 2}\n" for number in range(4))
    (tmp_path / "test.tsv").write_text(f"text\tlabel\n{lines}", encoding="utf-8")
    path = tmp_path / "evaluate_config.yaml"
    path.write_text(
        "tasks:\n"
        f"  - {{name: first, test_data: {tmp_path}/test.tsv}}\n"
        f"  - {{name: second, test_data: {tmp_path}/test.tsv, metric: macro_f1, max_new_tokens: 4}}\n",
        encoding="utf-8",
    )
    return load(TaskSettings, path)


def measure(settings: TaskSettings, models: list[Any], cache: Path | None) -> dict[str, dict[str, float | None]]:
    files = task_data.find_task_files(settings)
    read = [(task_data.read_task(settings, each, 1), dict[str, Overlap]()) for each in files]
    sections = tasks.measure_tasks(read, models, seed=1, cache=cache)
    return {each.name: {row.model: row.value for row in each.rows} for each in sections}


def test_each_model_answers_all_tasks_before_the_next_is_loaded(settings: TaskSettings) -> None:
    log: list[str] = []
    found = measure(settings, [Parrot("a", "0", log), Parrot("b", "none", log)], None)
    assert log == ["a", "a", "b", "b"]
    assert found == {
        "task: first, accuracy": {"a": 50.0, "b": 0.0},
        "task: second, macro f1": {"a": pytest.approx(100 / 3), "b": 0.0},
    }


def test_answers_are_kept_by_content(settings: TaskSettings, tmp_path: Path) -> None:
    log: list[str] = []
    first = measure(settings, [Parrot("a", "0", log)], tmp_path / "cache")
    assert log == ["a", "a"]
    again = measure(settings, [Parrot("renamed", "-", log, content="a"), Parrot("b", "1", log)], tmp_path / "cache")
    assert log == ["a", "a", "b", "b"], "the first was not asked again"
    assert [each["renamed"] for each in again.values()] == [each["a"] for each in first.values()]


def test_answers_are_kept_in_blocks_and_a_damaged_one_is_asked_again(
    settings: TaskSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "BLOCK_PROMPTS", 3)
    log: list[str] = []
    cache = tmp_path / "cache"
    first = measure(settings, [Parrot("a", "0", log)], cache)
    blocks = list(cache.glob("*/*.json"))
    assert len(blocks) == len(log) == 4
    blocks[0].write_text('{"outputs": ["0"', encoding="utf-8")
    assert measure(settings, [Parrot("a", "0", log)], cache) == first and len(log) == 5
    monkeypatch.setattr(kept, "_PACKAGES", ("numpy",))
    measure(settings, [Parrot("a", "0", log)], cache)
    assert len(log) == 9, "another version measures anew"


def test_the_limit_is_the_tasks_or_that_of_its_answers(settings: TaskSettings) -> None:
    model: Any = Parrot("a", "0", [])
    read = [task_data.read_task(settings, files, 1) for files in task_data.find_task_files(settings)]
    limits = [
        answers.answers_of(model, task.sources, task.references, task.max_new_tokens, task.name).max_new_tokens
        for task in read
    ]
    assert limits == [3, 4] and answers.num_tokens_allowed(model.tokenizer, ["1234"]) == 6
