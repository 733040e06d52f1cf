"""The tasks of an evaluation: the entries of `tasks:` in `evaluate_config.yaml`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from zerokara.config.finetune_config import DataFormat, LabelWords
from zerokara.config.settings import Auto, PositiveWhole, Settings, Text, Words, as_tuple, rule
from zerokara.errors import Fault

TaskMetric = Literal["accuracy", "macro_f1", "exact_match", "word_accuracy", "chrf"]
PLACE_OF_INPUT = "{input}"


class EvaluationTask(BaseModel):
    """One task: test data, how it is asked, and how the answers are judged."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    name: Text
    """Name in all tables."""
    test_data: Words
    """Test examples: files as train_data in finetune_config.yaml."""
    train_data: Words = ()
    """Training examples, from which baselines learn, and with which the test examples are compared."""
    data_format: DataFormat | Auto = "auto"
    """As in finetune_config.yaml."""
    input_field: Text | Auto = "auto"
    """As in finetune_config.yaml."""
    output_field: Text | Auto = "auto"
    """As in finetune_config.yaml."""
    label_words: LabelWords = Field(default_factory=dict)
    """As in finetune_config.yaml."""
    prompt_template: str = "auto"
    """As in finetune_config.yaml."""
    system_prompt: str = ""
    """As in finetune_config.yaml."""
    metric: TaskMetric | Auto = "auto"
    """`auto` is accuracy for labels, exact_match for texts."""
    max_new_tokens: PositiveWhole | Auto = "auto"
    """Most tokens of an answer; `auto` is a quarter more than the longest right answer has."""

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Only the settings that differ from their defaults."""
        for key, field in type(self).model_fields.items():
            if (value := getattr(self, key)) != field.get_default(call_default_factory=True):
                yield key, value


class TaskSettings(Settings):
    """Tasks: answers that the models generate"""

    tasks: Annotated[tuple[EvaluationTask, ...], BeforeValidator(as_tuple)] = ()
    """Tasks with test data, e.g. `- {name: reviews, test_data: data/test.tsv, train_data: data/train.tsv,
    label_words: {0: negative, 1: positive}}`. Keys: name, test_data; train_data (for the baselines, and to name test
    examples that occur in it); data_format, input_field, output_field, label_words, prompt_template, system_prompt as
    in finetune_config.yaml; metric (accuracy, macro_f1, exact_match, word_accuracy, chrf; auto); max_new_tokens. Empty:
    none."""
    pretraining_data: Words = ()
    """Corpus of the pretraining, as input_jsonl in config.yaml: scores are also given without the test examples that
    occur in it. Empty: not compared."""
    max_task_examples: PositiveWhole | Literal["all"] = "all"
    """Test examples of each task that are used, drawn at random; `all` of them."""

    @rule("tasks")
    def _tasks_differ_and_have_a_place_for_the_input(self) -> Iterator[Fault]:
        names = [task.name for task in self.tasks]
        for number, task in enumerate(self.tasks):
            if names.index(task.name) != number:
                yield self.fault(f"tasks[{number}].name", "is the name of two tasks", "give each a name of its own")
            if not task.test_data:
                yield self.fault(f"tasks[{number}].test_data", "must name at least one file")
            template = task.prompt_template
            if template != "auto" and template.count(PLACE_OF_INPUT) != 1:
                rule_text = f"must hold {PLACE_OF_INPUT} once, where the text goes"
                yield self.fault(f"tasks[{number}].prompt_template", rule_text, f'e.g. "{PLACE_OF_INPUT}\\n"')

    @rule("pretraining_data", "tasks")
    def _pretraining_data_has_a_use(self) -> Iterator[Fault]:
        if self.pretraining_data and not self.tasks:
            yield self.fault("pretraining_data", "has no effect without tasks", "remove it, or add a task")
