"""`evaluate_config.yaml`: step 8, models measured side by side."""

from __future__ import annotations

from collections.abc import Iterator
from os.path import normpath
from typing import Annotated, Literal

from pydantic import Field

from zerokara.config.evaluation_tasks import TaskSettings
from zerokara.config.sample_lengths import MIN_CONTEXT
from zerokara.config.settings import Auto, NaturalWhole, PositiveWhole, Settings, Text, Words, rule
from zerokara.errors import Fault


class EvaluatedModels(Settings):
    """Models to evaluate (step 8)."""

    models: Words = ("models/embedded_hf",)
    """Hugging Face folders on this machine, those of step 4 and anyone's; code that comes with a model is never run."""
    output_dir: Text = "evaluation/embedded"
    """Folder for the results: results.json, report.html, and what was measured so far (cache/)."""
    add_to_card: Words = ()
    """Those of the models into whose model card (README.md) the results are written, as `model-index` metadata."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; `auto` takes a GPU if there is one."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the computation, the same for all models, whatever their weights were saved in."""
    batch_tokens: PositiveWhole | Auto = "auto"
    """Tokens computed at once; `auto` takes what keeps the logits below half a gigabyte."""
    seed: NaturalWhole = 1234
    """Random seed of the documents drawn and of the resampling that gives the intervals."""

    @rule("models")
    def _has_models(self) -> Iterator[Fault]:
        if not self.models:
            yield self.fault("models", "must name at least one Hugging Face folder", "e.g. models/embedded_hf")
        if len({*map(normpath, self.models)}) < len(self.models):
            yield self.fault("models", "names a folder twice")

    @rule("models", "add_to_card")
    def _cards_are_of_models(self) -> Iterator[Fault]:
        if others := [name for name in self.add_to_card if normpath(name) not in map(normpath, self.models)]:
            yield self.fault("add_to_card", f"names {others[0]}, which is not among models")


class TextSettings(Settings):
    """Bits per byte: how well a model predicts text, whatever its tokenizer"""

    texts: Words = ()
    """Raw text that no model was trained on, each entry measured by itself: as input_jsonl in config.yaml. Empty: no
    bits per byte."""
    text_field: Text = "text"
    """Field of a JSON line, or column of a .parquet, that holds the text."""
    txt_document: Literal["file", "line"] = "file"
    """Whether a document of a .txt file is the whole `file` or each `line`."""
    max_text_bytes: PositiveWhole = 10_000_000
    """Most bytes of each entry; of a longer one, documents are drawn at random."""
    context_length: PositiveWhole | Auto = "auto"
    """Tokens that a model sees at once; `auto` is each model's own context length."""
    min_context: Annotated[float, Field(ge=0, lt=1)] = MIN_CONTEXT
    """Least share of the context length that stands before a token in a document longer than it: 0 cuts it into windows
    that know nothing of each other, 0.75 takes four times the time and predicts a little better."""


class HarnessSettings(Settings):
    """Tasks of lm-evaluation-harness, which needs packages of its own and is given no network"""

    lm_eval_tasks: Words = ()
    """YAML files of tasks, folders of such files, or names of tasks that come with it, whose data must be on this
    machine. Code that such a file names is run. It needs the packages of requirements-lm-eval.lock."""
    lm_eval_limit: PositiveWhole | Auto = "auto"
    """Examples of each of these tasks; `auto` takes all."""


class EvaluateConfig(HarnessSettings, TaskSettings, TextSettings, EvaluatedModels):
    """Evaluation."""
