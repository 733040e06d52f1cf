"""Tasks read from files as fine-tuning reads them; what is wrong is named with its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from zerokara.config.evaluate_config import EvaluateConfig
from zerokara.config.loading import load
from zerokara.errors import UserError
from zerokara.evaluation import inputs as task_data
from zerokara.evaluation.inputs import TaskData as Task

TRAIN = "id\tdocument\tlabel\n" + "".join(f"{n}\tfilm number {n}\t{n % 2}\n" for n in range(8))
TEST = "id\tdocument\tlabel\n" + "".join(f"{n}\tfilm number {n}\t{n % 2}\n" for n in range(6, 12))
LONG = "one of the longer sentences that somebody may have read before in the corpus of the pretraining"


def config_of(folder: Path, text: str) -> EvaluateConfig:
    path = folder / "evaluate_config.yaml"
    path.write_text(text.replace("FOLDER", str(folder)), encoding="utf-8")
    return load(EvaluateConfig, path)


def tasks_of(config: EvaluateConfig) -> list[Task]:
    return [task_data.read_task(config, files, seed=1) for files in task_data.find_task_files(config)]


def write_jsonl(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def faults_of(folder: Path, text: str) -> list[Any]:
    with pytest.raises(UserError) as caught:
        tasks_of(config_of(folder, text))
    return caught.value.faults


REVIEWS = """tasks:
  - name: reviews
    test_data: FOLDER/test.tsv
    train_data: FOLDER/train.tsv.gz
    label_words: {0: bad, 1: good}
"""


def reviews(folder: Path, test: str = TEST) -> None:
    (folder / "test.tsv").write_text(test, encoding="utf-8")
    (folder / "train.tsv.gz").write_bytes(gzip.compress(TRAIN.encode()))


def test_texts_with_labels(tmp_path: Path) -> None:
    reviews(tmp_path)
    config = config_of(tmp_path, REVIEWS)
    (task,) = tasks_of(config)
    assert (task.name, task.metric, task.labels) == ("reviews", "accuracy", ("bad", "good"))
    assert task.sources[0] == "film number 6" and task.references == ["bad", "good"] * 3
    assert task.train[1] == ("film number 1", "good") and len(task.train) == 8
    assert task.warnings == () and task.max_new_tokens is None
    (found,) = task_data.overlaps(config, [task])
    assert found[task_data.TRAINING].exact == [0, 1] and len(found) == 1


def test_pairs_conversations_and_a_corpus(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "pairs.jsonl", [{"source": "sta", "target": "stă"}, {"source": "x", "target": LONG}])
    turns = [("system", "be brief"), ("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "2")]
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": [{"role": a, "content": b} for a, b in turns]}])
    write_jsonl(tmp_path / "corpus.jsonl", [{"text": f"Before. {LONG}, and after."}, {"text": "other"}])
    text = """tasks:
      - {name: pairs, test_data: FOLDER/pairs.jsonl, metric: chrf, max_new_tokens: 9, prompt_template: "Fix: {input}"}
      - {name: chat, test_data: [FOLDER/chat.jsonl]}
    pretraining_data: [FOLDER/corpus.jsonl]
    """.replace("\n    ", "\n")
    config = config_of(tmp_path, text)
    pairs, chat = tasks_of(config)
    assert (pairs.metric, chat.metric) == ("chrf", "exact_match") and pairs.max_new_tokens == 9
    assert pairs.prompts(False) == ["Fix: sta", "Fix: x"] and pairs.labels == ()
    assert [turn["content"] for turn in chat.prompts(False)[0]] == ["be brief", "one", "1", "two"]  # type: ignore[index]
    assert chat.references == ["2"]
    found = task_data.overlaps(config, [chat, pairs])
    assert [each[task_data.PRETRAINING].found for each in found] == [[], [1]]


def test_a_corpus_without_documents_is_an_error(tmp_path: Path) -> None:
    reviews(tmp_path)
    write_jsonl(tmp_path / "corpus.jsonl", [{"body": "x"}])
    config = config_of(tmp_path, REVIEWS + "pretraining_data: [FOLDER/corpus.jsonl]\n")
    with pytest.raises(UserError) as caught:
        task_data.overlaps(config, tasks_of(config))
    assert caught.value.faults[0].key == "pretraining_data"
    assert len(task_data.overlaps(config.model_copy(update={"text_field": "body"}), tasks_of(config))[0]) == 2


def test_some_of_the_test_examples(tmp_path: Path) -> None:
    reviews(tmp_path)
    config = config_of(tmp_path, REVIEWS + "max_task_examples: 4\n")
    (task,) = tasks_of(config)
    assert len(task.sources) == 4 and len(task.warnings) == 1
    numbers = [int(source.split()[-1]) for source in task.sources]
    assert numbers == sorted(numbers) and tasks_of(config)[0].sources == task.sources


def test_a_few_bad_lines_are_left_out_and_counted_many_are_an_error(tmp_path: Path) -> None:
    good = "".join(f"{n}\tfilm {n}\t1\n" for n in range(200))
    reviews(tmp_path, f"id\tdocument\tlabel\n{good}x\t\t1\ny\n")
    (task,) = tasks_of(config_of(tmp_path, REVIEWS))
    assert len(task.sources) == 200 and len(task.warnings) == 1 and task.warnings[0].startswith("2 lines")
    reviews(tmp_path, f"id\tdocument\tlabel\n{good}" + "x\t\t1\n" * 9)
    (fault,) = faults_of(tmp_path, REVIEWS)
    assert "9 of 209" in fault.rule


@pytest.mark.parametrize(
    ("change", "key", "line"),
    [
        (("label_words: {0: bad, 1: good}", "label_words: {0: bad}"), "label", "test.tsv:3"),
        (("label_words: {0: bad, 1: good}", "data_format: source_target"), "tasks[0].data_format", "yaml:5"),
        (("label_words: {0: bad, 1: good}", "metrics: chrf"), "tasks[0].metrics", "yaml:5"),
        (("name: reviews", "metric: chrf"), "tasks[0].name", "yaml:2"),
        (("label_words: {0: bad, 1: good}", "prompt_template: no place"), "tasks[0].prompt_template", "yaml:5"),
        (("label_words: {0: bad, 1: good}", "system_prompt: idle"), "tasks[0].system_prompt", "yaml:5"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, change: tuple[str, str], key: str, line: str) -> None:
    reviews(tmp_path)
    fault = faults_of(tmp_path, REVIEWS.replace(*change))[0]
    assert fault.key == key and fault.where.endswith(line), str(fault)


def test_names_differ_and_settings_have_a_use(tmp_path: Path) -> None:
    reviews(tmp_path)
    twice = REVIEWS + REVIEWS.partition("\n")[2]
    assert [fault.key for fault in faults_of(tmp_path, twice)] == ["tasks[1].name"]
    assert [fault.key for fault in faults_of(tmp_path, "pretraining_data: [x]\n")] == ["pretraining_data"]
