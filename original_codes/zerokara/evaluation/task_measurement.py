"""The tasks of a configuration and the models → sections of the results.

Each model answers all tasks before the next one is loaded. Answers stay in the cache by content (the model's files, the
prompts, the limit), so that a run that was stopped continues, and a further model costs only its own time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from zerokara.evaluation import answers, tasks
from zerokara.evaluation import cache as kept
from zerokara.evaluation.answers import Answers
from zerokara.evaluation.overlap import Overlap
from zerokara.evaluation.results import Section
from zerokara.evaluation.tasks import Task

BLOCK_PROMPTS = 512
"""Prompts that are answered at once; a run that is killed loses no more."""


class AskedModel(Protocol):
    """What is asked of a model: `evaluation.models.LoadedModel` has it."""

    name: str
    tokenizer: Any
    dtype: Any

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether it has an encoder."""

    @property
    def content(self) -> str:
        """A hash of its files."""

    @property
    def model(self) -> Any:
        """The transformers model, in evaluation mode; loaded when it is asked for."""


def measured(
    read: Iterable[tuple[Task, dict[str, Overlap]]], models: Sequence[AskedModel], *, seed: int, cache: Path | None
) -> Iterator[Section]:
    """Every section of every task, which comes with what overlaps; `cache` is a folder for answers.

    Raises:
        RunError: a model cannot be asked: it has no end token, or no chat template for conversations.
    """
    found = [(task, overlap, dict[str, Answers]()) for task, overlap in read]
    for model in models:
        for task, _, given in found:
            given[model.name] = answers_of(model, task, cache)
    for task, overlap, given in found:
        yield from tasks.sections(task, given, overlap, seed)


def answers_of(model: AskedModel, task: Task, cache: Path | None = None) -> Answers:
    """The answers of a model to a task; blocks of prompts that it answered before are read from the cache."""
    limit = task.max_new_tokens or answers.num_tokens_allowed(model.tokenizer, [*task.references, *task.labels])
    prompts = task.prompts(model.is_encoder_decoder)
    folder = kept.folder_of(cache, model.content, str(model.dtype), prompts, limit, BLOCK_PROMPTS)
    found = Answers([], [], limit)
    for index, start in enumerate(range(0, len(prompts), BLOCK_PROMPTS)):
        asked = prompts[start : start + BLOCK_PROMPTS]
        block = kept.read(folder, index, len(asked), Answers)
        if block is None:
            part = f", {start + 1:,} to {start + len(asked):,} of {len(prompts):,}" if len(asked) < len(prompts) else ""
            label = f"{task.name}, {model.name}{part}"
            block = answers.answer(model.model, model.tokenizer, asked, max_new_tokens=limit, label=label)
            assert block is not None, "nothing gives it up"
            kept.write(folder, index, asdict(block))
        outputs, stopped = [*found.outputs, *block.outputs], [*found.stopped, *block.stopped]
        found = Answers(outputs, stopped, limit, found.num_too_long + block.num_too_long)
    return found
