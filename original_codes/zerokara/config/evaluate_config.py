"""`evaluate_config.yaml`: step 8, models measured side by side."""

from collections.abc import Iterator
from os.path import normpath
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from zerokara.base.errors import Fault
from zerokara.config.data import MIN_CONTEXT
from zerokara.config.finetune_config import DataFormat
from zerokara.config.settings import Auto, Entry, Names, NaturalInt, PositiveInt, Settings, Text, Words, as_tuple


class EvaluatedModels(Settings):
    """Models to evaluate (step 8)."""

    models: Names = ("models/embedded_hf",)
    """Hugging Face folders on this machine, from step 4 or elsewhere; code that comes with a model is never run."""
    output_dir: Text = "evaluation/embedded"
    """Folder for the results: results.json, report.html, and what was measured so far (cache/)."""
    add_to_card: Words = ()
    """Models whose model card (README.md) gets the results, as `model-index` metadata."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; `auto` takes a GPU if there is one."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the computation, the same for all models, whatever their weights were saved in."""
    batch_tokens: PositiveInt | Auto = "auto"
    """Tokens computed at once. `auto` is 2,048 on a CPU and 16,384 on a GPU, but at least one window, and fewer if the
    logits take more than half a gigabyte."""
    seed: NaturalInt = 1234
    """Random seed of the documents drawn and of the resampling that gives the intervals."""

    def rules(self) -> Iterator[Fault]:
        folders = [normpath(name) for name in self.models]
        if len(set(folders)) < len(folders):
            yield self.fault("models", "names a folder twice")
        if others := [name for name in self.add_to_card if normpath(name) not in folders]:
            yield self.fault("add_to_card", f"names {others[0]}, which is not among models", reads=["models"])


class TextSettings(Settings):
    """Bits per byte: how well a model predicts text, whatever its tokenizer"""

    texts: Words = ()
    """Raw text that no model was trained on, each entry measured by itself: as input_jsonl in config.yaml."""
    text_field: Text = "text"
    """Field of a JSON line, or column of a .parquet, that holds the text."""
    txt_document: Literal["file", "line"] = "file"
    """Document of a .txt file: the whole `file`, or each `line`."""
    max_text_bytes: PositiveInt = 10_000_000
    """Maximum number of bytes measured of each entry; from a larger entry, documents are drawn at random."""
    context_length: PositiveInt | Auto = "auto"
    """Tokens that a model sees at once; `auto` is each model's own context length."""
    min_context: Annotated[float, Field(ge=0, lt=1)] = MIN_CONTEXT
    """In a document longer than the context, minimum share of the context that precedes a token after the first window.
    0 cuts the document into separate windows; 0.75 takes four times as long and predicts a little better."""


class EvaluationTask(Entry):
    """One task: test data, how it is asked, and how the answers are judged; its keys are described at `tasks`."""

    name: Text
    test_data: Names
    train_data: Words = ()
    data_format: DataFormat | Auto = "auto"
    input_field: Text | Auto = "auto"
    output_field: Text | Auto = "auto"
    label_words: dict[str, str] = Field(default_factory=dict)
    prompt_template: str = "auto"
    system_prompt: str = ""
    metric: Literal["accuracy", "macro_f1", "exact_match", "word_accuracy", "chrf"] | Auto = "auto"
    """`auto` is accuracy for labels, exact_match for texts."""
    max_new_tokens: PositiveInt | Auto = "auto"
    """Most tokens of an answer; `auto` is a quarter more than the longest right answer has."""


class TaskSettings(Settings):
    """Tasks: answers that the models generate"""

    tasks: Annotated[tuple[EvaluationTask, ...], BeforeValidator(as_tuple)] = ()
    """Tasks with test data, e.g. `- {name: reviews, test_data: data/test.tsv, train_data: data/train.tsv,
    label_words: {0: negative, 1: positive}}`. Keys: name, test_data; train_data (for the baselines, and to find test
    examples that occur in it); data_format, input_field, output_field, label_words, prompt_template, system_prompt as
    in finetune_config.yaml (by default a fine-tuned model gets the last three from its finetune.json); metric
    (accuracy, macro_f1, exact_match, word_accuracy, chrf; auto); max_new_tokens."""
    pretraining_data: Words = ()
    """Corpus of the pretraining, as input_jsonl: scores are also given without the test examples that occur in it."""
    max_task_examples: PositiveInt | Literal["all"] = "all"
    """Maximum number of test examples of each task, drawn at random; `all` uses all of them."""

    def rules(self) -> Iterator[Fault]:
        names = [task.name for task in self.tasks]
        for number, task in enumerate(self.tasks):
            if names.index(task.name) != number:
                yield self.fault(f"tasks[{number}].name", "is the name of two tasks", "give each a name of its own")
            if task.prompt_template != "auto" and task.prompt_template.count("{input}") != 1:
                rule = "must hold {input} once, where the text goes"
                yield self.fault(f"tasks[{number}].prompt_template", rule, 'e.g. "{input}\\n"')
        if self.pretraining_data and not self.tasks:
            yield self.fault("pretraining_data", "has no effect without tasks", "remove it, or add a task", ["tasks"])


class EvaluateConfig(TaskSettings, TextSettings, EvaluatedModels):
    """Evaluation."""
