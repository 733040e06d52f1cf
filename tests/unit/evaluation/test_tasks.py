"""The report on a task: scores, intervals, differences, baselines, and what overlaps."""

import json
import random

import pytest

from zerokara.evaluation import overlap, scoring, tasks
from zerokara.evaluation.answers import Answers
from zerokara.evaluation.inputs import TaskData
from zerokara.evaluation.results import Section

LABELS = ("good", "bad")


@pytest.fixture(scope="module")
def task() -> TaskData:
    """Reviews whose label their last word tells, now and then misspelt so that only its characters do.

    Two of the test examples are training examples.
    """
    chance = random.Random(1)

    def pair(number: int) -> tuple[str, str]:
        label = chance.choice(LABELS)
        words = " ".join(chance.choices(["film", "actor", "story", "end", "music"], k=4))
        misspelt = chance.choice("abcdefgh") * chance.randint(1, 4) if chance.random() < 0.5 else ""
        return f"{number} {words} {label}{misspelt}", label

    train, test = [pair(number) for number in range(120)], [pair(1000 + number) for number in range(120)]
    test[3], test[7] = train[0], train[1]
    sources, references = [source for source, _ in test], [target for _, target in test]
    return TaskData("reviews", "accuracy", sources, references, labels=LABELS, train=train)


def answers_of(outputs: list[str], stopped: int = 0) -> Answers:
    return Answers(outputs, [index < stopped for index in range(len(outputs))], 8)


@pytest.fixture(scope="module")
def sections(task: TaskData) -> list[Section]:
    """One model that is always right, and one that is right for the odd examples."""
    half = [answer if index % 2 else "no idea" for index, answer in enumerate(task.references)]
    overlaps = {
        "training data": overlap.find([[(each,) for each in task.sources]], [each for each, _ in task.train])[0]
    }
    models = {"sure": answers_of(list(task.references), 120), "half": answers_of(half, 60)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "NUM_RESAMPLES", 400)
        return list(tasks.sections(task, models, overlaps))


def test_models_and_baselines_stand_beside_each_other_in_per_cent(task: TaskData, sections: list[Section]) -> None:
    found = sections[0]
    assert (found.metric, found.unit, found.higher_is_better) == ("accuracy", "%", True)
    assert [(row.model, row.value) for row in found.ranked()] == [("sure", 100.0), ("half", 50.0)]
    baselines = {each.model: each.value for each in found.baselines}
    assert list(baselines) == ["majority", "bag_of_words", "character_ngrams"]
    references = task.references
    assert baselines["majority"] == max(100 * references.count(label) / len(references) for label in LABELS)
    assert baselines["majority"] + 10 < baselines["bag_of_words"] < baselines["character_ngrams"] == 100
    for each in (*found.rows, *found.baselines):
        assert each.value is not None and each.interval is not None
        assert each.interval.low <= each.value <= each.interval.high


def test_outputs_that_are_no_label_and_answers_that_were_cut_are_counted(sections: list[Section]) -> None:
    details = {row.model: row.details for row in sections[0].rows}
    unmatched = {"outputs": 60, "most_common": [["no idea", 60]]}
    assert details["half"] == {"stopped": 50.0, "too_long": 0, "unmatched": unmatched}
    assert details["sure"] == {"stopped": 100.0, "too_long": 0, "unmatched": {"outputs": 0, "most_common": []}}
    assert [len(row.notes) for row in sections[0].rows] == [0, 2]
    json.dumps([each.as_json() for each in sections], allow_nan=False)


def test_differences_are_paired_and_between_models_or_of_a_model_to_a_baseline(sections: list[Section]) -> None:
    found = sections[0].differences
    pairs = [(each.a, each.b) for each in found]
    assert pairs[0] == ("sure", "half") and ("half", "majority") in pairs
    assert len(pairs) == 1 + 2 * 3 and ("majority", "bag_of_words") not in pairs
    assert found[0].difference == 50.0 and found[0].interval is not None
    assert 35 < found[0].interval.low < 50 < found[0].interval.high < 65


def test_scores_without_the_examples_that_occur_in_training(sections: list[Section]) -> None:
    first, second = sections
    assert first.facts["overlap"] == {"training data": {"exact": 2, "by_ngram": 0, "examples": 2}}
    assert len(first.warnings) == 1 and "2 of 120" in first.warnings[0]
    half = next(row for row in second.rows if row.model == "half")
    assert half.n == 118 and half.value == 100 * 58 / 118  # examples 3 and 7, which are odd, were right
    assert {each.model for each in second.baselines} == {each.model for each in first.baselines}


def test_a_corpus_is_searched_for_sources_and_texts_but_not_for_labels_and_short_answers(task: TaskData) -> None:
    assert overlap.find([task.texts], ["good", task.sources[5]])[0].found == [5]
    long = "two words and six more of them too"
    texts = TaskData("t", "exact_match", ["one", "one"], [long, long.removesuffix(" too")]).texts
    assert texts == [("one", long), ("one",)]


def test_a_task_of_texts_stands_beside_copying_and_the_most_frequent_forms() -> None:
    train = [("fata sta", "fața stă"), ("o fata", "o fată"), ("nu sta", "nu stă")]
    task = TaskData("diacritics", "word_accuracy", ["o fata sta", "fata"], ["o fată stă", "fața"], train=train)
    (found,) = tasks.sections(task, {"model": answers_of(["o fată sta", "fata"])}, {})
    assert found.metric == "word_accuracy" and found.rows[0].value == 50.0
    baselines = {each.model: each.value for each in found.baselines}
    assert baselines == {"copy": 25.0, "most_frequent_form": 75.0, "most_frequent_form_left": 100.0}
