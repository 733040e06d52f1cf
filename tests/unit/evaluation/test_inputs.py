"""Texts drawn at random, and tasks read as fine-tuning reads them; what is wrong is named with its place."""

import gzip
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from configs import fault_of, loaded, refused
from corpus_files import write_jsonl, write_texts

from zerokara.config.evaluate_config import EvaluateConfig, TextSettings
from zerokara.corpus.find import find_files
from zerokara.evaluation import inputs
from zerokara.evaluation.inputs import MeasuredText, TaskData

TABLE = "id\tdocument\tlabel\n"
LONG = "one of the longer sentences that somebody may have read before in the corpus of the pretraining"
WORDS = "label_words: {0: bad, 1: good}"
REVIEWS = f"""tasks:
  - name: reviews
    test_data: FOLDER/test.tsv
    train_data: FOLDER/train.tsv.gz
    {WORDS}
"""


def read(folder: Path, texts: Sequence[str], seed: int = 1, max_bytes: int = 10**6) -> MeasuredText:
    path = write_texts(folder / "held_out.jsonl", texts)
    config = TextSettings(texts=(path,), max_text_bytes=max_bytes)
    (text,) = inputs.read_texts(config, find_files(config.texts, "here"), seed)
    return text


def test_documents_are_drawn_at_random_up_to_a_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(3)
    documents = [f"{number:03d}ț" * chance.choice((2, 5, 100)) for number in range(60)]
    drawn = [read(tmp_path, documents, seed, 900) for seed in (1, 1, 2)]
    for text in drawn:
        assert list(text.documents) == sorted(text.documents) and text.num_found == 60 > len(text.documents) > 1
        assert sum(text.bytes) == len("".join(text.documents).encode()) <= 900
    assert drawn[0] == drawn[1] and drawn[0].content == drawn[1].content != drawn[2].content
    assert len(read(tmp_path, documents).documents) == 60 and "warning" not in capsys.readouterr().err
    assert len(read(tmp_path, documents, max_bytes=5).documents) == 1
    assert "max_text_bytes" in "".join(capsys.readouterr())


def test_files_of_one_name_are_told_apart_and_a_text_without_documents_is_refused(tmp_path: Path) -> None:
    paths = [write_jsonl(tmp_path / folder / "x.jsonl", [{"text": "one"}, {"body": "two"}]) for folder in ("a", "b")]
    config = TextSettings(texts=tuple(paths))
    texts = list(inputs.read_texts(config, find_files(paths, "here"), 1))
    assert [text.name for text in texts] == ["a/x.jsonl", "b/x.jsonl"]
    assert texts[0].documents == ("one",) and sum(texts[0].bad_lines.values()) == 1
    write_jsonl(tmp_path / "b" / "x.jsonl", [{"body": "two"}])
    assert fault_of(lambda: list(inputs.read_texts(config, find_files(paths, "here"), 1))).key == "texts[1]"


def config_of(folder: Path, text: str) -> EvaluateConfig:
    return loaded(folder, text.replace("FOLDER", str(folder)), of=EvaluateConfig)


def tasks_of(folder: Path, text: str) -> list[TaskData]:
    config = config_of(folder, text)
    return [
        inputs.read_task(config, number, files, seed=1) for number, files in enumerate(inputs.find_task_files(config))
    ]


def reviews(folder: Path, test: str = "".join(f"{n}\tfilm number {n}\t{n % 2}\n" for n in range(6, 12))) -> None:
    train = "".join(f"{n}\tfilm number {n}\t{n % 2}\n" for n in range(8))
    (folder / "test.tsv").write_text(TABLE + test, encoding="utf-8")
    (folder / "train.tsv.gz").write_bytes(gzip.compress((TABLE + train).encode()))


def test_texts_with_labels(tmp_path: Path) -> None:
    reviews(tmp_path)
    (task,) = tasks_of(tmp_path, REVIEWS)
    assert (task.name, task.metric, task.labels) == ("reviews", "accuracy", ("bad", "good"))
    assert task.sources[0] == "film number 6" and task.references == ["bad", "good"] * 3
    assert task.train[1] == ("film number 1", "good") and len(task.train) == 8
    assert task.warnings == () and task.max_new_tokens is None
    (found,) = inputs.overlaps(config_of(tmp_path, REVIEWS), [task])
    assert found[inputs.TRAINING].exact == [0, 1] and len(found) == 1


def test_pairs_conversations_and_a_corpus(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "pairs.jsonl", [{"source": "sta", "target": "stă"}, {"source": "x", "target": LONG}])
    turns = [("system", "be brief"), ("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "2")]
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": [{"role": a, "content": b} for a, b in turns]}])
    write_jsonl(tmp_path / "corpus.jsonl", [{"body": f"Before. {LONG}, and after."}, {"body": "other"}])
    text = """tasks:
  - {name: pairs, test_data: FOLDER/pairs.jsonl, metric: chrf, max_new_tokens: 9, prompt_template: "Fix: {input}"}
  - {name: chat, test_data: [FOLDER/chat.jsonl]}
pretraining_data: [FOLDER/corpus.jsonl]
"""
    pairs, chat = tasks_of(tmp_path, text)
    assert (pairs.metric, chat.metric) == ("chrf", "exact_match") and pairs.max_new_tokens == 9
    assert pairs.prompts(False) == ["Fix: sta", "Fix: x"] and pairs.labels == ()
    assert [turn["content"] for turn in chat.prompts(False)[0]] == ["be brief", "one", "1", "two"]  # type: ignore[index]
    assert chat.references == ["2"]
    found = inputs.overlaps(config_of(tmp_path, text + "text_field: body\n"), [chat, pairs])
    assert [each[inputs.PRETRAINING].found for each in found] == [[], [1]]
    fault = fault_of(inputs.overlaps, config_of(tmp_path, text), [chat, pairs])
    assert fault.key == "pretraining_data", "a corpus without documents is an error"


def test_some_of_the_test_examples(tmp_path: Path) -> None:
    reviews(tmp_path)
    (task,), (again,) = (tasks_of(tmp_path, REVIEWS + "max_task_examples: 4\n") for _ in range(2))
    numbers = [int(source.split()[-1]) for source in task.sources]
    assert len(numbers) == 4 and numbers == sorted(numbers) and len(task.warnings) == 1
    assert again.sources == task.sources


def test_a_few_bad_lines_are_left_out_and_counted_many_are_an_error(tmp_path: Path) -> None:
    good = "".join(f"{n}\tfilm {n}\t1\n" for n in range(200))
    reviews(tmp_path, f"{good}x\t\t1\ny\n")
    (task,) = tasks_of(tmp_path, REVIEWS)
    assert len(task.sources) == 200 and len(task.warnings) == 1 and task.warnings[0].startswith("2 lines")
    reviews(tmp_path, good + "x\t\t1\n" * 9)
    assert "9 of 209" in fault_of(tasks_of, tmp_path, REVIEWS).rule
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "1", "tool_calls": [{"name": "x"}]}]
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": turns}])
    fault = fault_of(tasks_of, tmp_path, "tasks: [{name: chat, test_data: FOLDER/chat.jsonl}]\n")
    assert "1 of 1" in fault.rule and "'tool_calls'" in fault.rule


@pytest.mark.parametrize(
    ("old", "new", "key", "line"),
    [
        (WORDS, "label_words: {0: bad}", "label", "test.tsv:3"),
        (WORDS, "data_format: source_target", "tasks[0].data_format", "yaml:5"),
        (WORDS, "metrics: chrf", "tasks[0].metrics", "yaml:5"),
        ("name: reviews", "metric: chrf", "tasks[0].name", "yaml:2"),
        (WORDS, "prompt_template: no place", "tasks[0].prompt_template", "yaml:5"),
        (WORDS, "system_prompt: idle", "tasks[0].system_prompt", "yaml:5"),
        (REVIEWS, REVIEWS + REVIEWS.partition("\n")[2], "tasks[1].name", "yaml:6"),
        (REVIEWS, "pretraining_data: [x]\n", "pretraining_data", "yaml:1"),
        (REVIEWS, "models: [m, m/]\n", "models", "yaml:1"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, old: str, new: str, key: str, line: str) -> None:
    reviews(tmp_path)
    fault = refused(tasks_of, tmp_path, REVIEWS.replace(old, new))[0]
    assert fault.key == key and fault.where.endswith(line), str(fault)
