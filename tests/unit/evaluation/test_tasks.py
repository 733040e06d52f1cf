"""The report on a task: scores, intervals, differences, baselines, and what overlaps."""

from __future__ import annotations

import json
import random

from zerokara.evaluation import overlap, tasks
from zerokara.evaluation.answers import Answers
from zerokara.evaluation.inputs import TaskData as Task
from zerokara.evaluation.results import Section

LABELS = ("good", "bad")


def reviews(num: int = 120) -> Task:
    chance = random.Random(1)
    words = ["film", "actor", "story", "end", "music"]

    def pair(number: int) -> tuple[str, str]:
        label = chance.choice(LABELS)
        return f"{number} {' '.join(chance.choices(words, k=4))} {label[:3]}{chance.choice('xyz')}", label

    train, test = [pair(number) for number in range(num)], [pair(1000 + number) for number in range(num)]
    test[3], test[7] = train[0], train[1]
    return Task(
        "reviews",
        "accuracy",
        [source for source, _ in test],
        [target for _, target in test],
        labels=LABELS,
        train=train,
    )


def answers_of(outputs: list[str], stopped: int = 0) -> Answers:
    return Answers(outputs, [index < stopped for index in range(len(outputs))], 8)


def sections_of(task: Task) -> list[Section]:
    right = list(task.references)
    half = [answer if index % 2 else "no idea" for index, answer in enumerate(right)]
    overlaps = {"training data": overlap.find([(each,) for each in task.sources], [each for each, _ in task.train])}
    return list(tasks.sections(task, {"sure": answers_of(right, 120), "half": answers_of(half, 60)}, overlaps))


def test_models_and_baselines_stand_beside_each_other_in_per_cent() -> None:
    found = sections_of(reviews())[0]
    assert (found.metric, found.unit, found.higher_is_better) == ("accuracy", "%", True)
    values = {row.model: row.value for row in found.rows}
    assert values == {"sure": 100.0, "half": 50.0}
    baselines = {each.name: each.value for each in found.baselines}
    assert list(baselines) == ["majority", "bag_of_words", "character_ngrams"]
    assert 50 <= baselines["majority"] < baselines["character_ngrams"]
    for each in (*found.rows, *found.baselines):
        assert each.value is not None and each.interval is not None
        assert each.interval.low <= each.value <= each.interval.high


def test_outputs_that_are_no_label_and_answers_that_were_cut_are_counted() -> None:
    found = sections_of(reviews())[0]
    details = {row.model: row.details for row in found.rows}
    assert details["half"] == {
        "stopped": 50.0,
        "too_long": 0,
        "unmatched": {"outputs": 60, "most_common": [["no idea", 60]]},
    }
    assert details["sure"] == {"stopped": 100.0, "too_long": 0, "unmatched": {"outputs": 0, "most_common": []}}
    assert [len(row.notes) for row in found.rows] == [0, 2]
    json.dumps([each.as_json() for each in sections_of(reviews())], allow_nan=False)


def test_differences_are_paired_and_between_models_or_of_a_model_to_a_baseline() -> None:
    found = sections_of(reviews())[0].differences
    pairs = [(each.a, each.b) for each in found]
    assert pairs[0] == ("sure", "half") and ("half", "majority") in pairs
    assert len(pairs) == 1 + 2 * 3 and ("majority", "bag_of_words") not in pairs
    assert found[0].difference == 50.0 and found[0].interval is not None
    assert 35 < found[0].interval.low < 50 < found[0].interval.high < 65


def test_scores_without_the_examples_that_occur_in_training() -> None:
    first, second = sections_of(reviews())
    assert first.facts["overlap"] == {"training data": {"exact": 2, "by_ngram": 0, "examples": 2}}
    assert len(first.warnings) == 1 and "2 of 120" in first.warnings[0]
    half = next(row for row in second.rows if row.model == "half")
    # Examples 3 and 7, which are odd, were right.
    assert half.n == 118 and half.value == 100 * 58 / 118
    assert {each.name for each in second.baselines} == {each.name for each in first.baselines}


def test_a_corpus_is_searched_for_sources_and_texts_but_not_for_labels() -> None:
    task = reviews()
    assert overlap.find(task.texts, ["good", task.sources[5]]).found == [5]
    two = "two words and six more of them"
    texts = Task("t", "exact_match", ["one"], [f"{two} too"])
    assert texts.texts == [("one", f"{two} too")]
    assert Task("t", "exact_match", ["one"], [two]).texts == [("one",)]


def test_a_task_of_texts_stands_beside_copying_and_the_most_frequent_forms() -> None:
    train = [("fata sta", "fața stă"), ("o fata", "o fată"), ("nu sta", "nu stă")]
    task = Task("diacritics", "word_accuracy", ["o fata sta", "fata"], ["o fată stă", "fața"], train=train)
    (found,) = tasks.sections(task, {"model": answers_of(["o fată sta", "fata"])}, {})
    assert found.metric == "word_accuracy" and found.rows[0].value == 50.0
    baselines = {each.name: each.value for each in found.baselines}
    assert baselines == {"copy": 25.0, "most_frequent_form": 75.0, "most_frequent_form_left": 100.0}


def test_prompts_are_those_of_fine_tuning() -> None:
    task = Task("t", "exact_match", ["a {x}"], ["b"])
    assert task.prompts(is_encoder_decoder=False) == ["a {x}\n"]
    assert task.prompts(is_encoder_decoder=True) == ["a {x}"]
    assert Task("t", "exact_match", ["a"], ["b"], prompt_template="Say {input}:").prompts(False) == ["Say a:"]
    turns = [{"role": "user", "content": "a"}]
    assert Task("t", "exact_match", ["a"], ["b"], conversations=[turns]).prompts(False) == [turns]
