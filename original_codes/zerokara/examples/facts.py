"""Facts of a fine-tuning in its run folder, for the export: `finetune.json`, the chat template, conversations.

`finetune.json` is one JSON object with the fields of `FinetuneFacts`, in which ``data`` and ``test`` are objects. The
export holds it, too: it says how the model is asked, wherever its folder lies.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pydantic

from zerokara.base.errors import Fault, UserError

PLACE_OF_INPUT = "{input}"
NAME = "finetune.json"
CONVERSATIONS_NAME = "conversations.jsonl"
"""Conversations of the training data, and their ids, on which the export is proved."""
CHAT_TEMPLATE_NAME = "chat_template.jinja"
"""The chat template, beside it, where the data were conversations; the name is Hugging Face's."""


@dataclass
class SplitCounts:
    """Counts of the examples of one split: read = kept + cut + dropped + bad."""

    kept: int = 0
    """Examples used as they are."""
    cut: int = 0
    """Examples used with a shortened prompt; of a conversation whole turns may be gone, with their answers."""
    dropped: int = 0
    """Examples left out: longer than a training sequence."""
    bad: int = 0
    """Lines that hold no example; the quarantine file lists them."""
    tokens: int = 0
    """Tokens of the examples used, learned ones included."""
    learned_tokens: int = 0
    """Tokens that the loss counts: the answers and their ends."""
    cut_learned_tokens: int = 0
    """Tokens of answers that are not learned: turns that were cut away with their questions."""
    longest_answer: int = 0
    """Tokens of the longest answer, with its end."""
    unknown_answers: int = 0
    """Answers with a character that the tokenizer does not know, or whose text it changes."""
    seen: int = 0
    """Examples whose input is that of an example of an earlier split."""

    @property
    def read(self) -> int:
        """All examples of the files."""
        return self.kept + self.cut + self.dropped + self.bad


@dataclass(frozen=True)
class MetricResult:
    """The metric on the test data, read once at the end, with its 95 % interval."""

    value: float
    low: float | None
    """None where there is no interval: for the loss, or for a single example."""
    high: float | None
    num_examples: int
    checkpoint: str
    """Name of the checkpoint that was tested."""


@dataclass(frozen=True)
class FinetuneFacts:
    """A fine-tuning in numbers."""

    task: str
    """Form of the examples, in a few words."""
    data: dict[str, SplitCounts]
    """Counts by split: ``train``, and ``valid`` and ``test`` where there are any."""
    metric: str
    """Name of the metric, as in `finetune_config.yaml`."""
    init_from: str
    """Name of the model that was fine-tuned; no folder."""
    test: MetricResult | None = None
    """Absent without test data."""
    baselines: dict[str, float] = field(default_factory=dict)
    """The metric of simple methods on the same test data, by name."""
    prompt_template: str = ""
    """Text around an input, with ``{input}`` in its place; empty for conversations."""
    name: str = ""
    """Names of the training data, without folders."""
    label_words: dict[str, str] = field(default_factory=dict)
    system_prompt: str = ""
    """System message of the conversations that have none of their own."""

    def text(self, given: str) -> str:
        """Return an input in the prompt template."""
        return (self.prompt_template or PLACE_OF_INPUT).replace(PLACE_OF_INPUT, given)

    def input_of(self, text: str) -> str:
        """Return what stands in the template in a text; the inverse of `text`."""
        before, _, behind = self.prompt_template.partition(PLACE_OF_INPUT)
        return text.removeprefix(before).removesuffix(behind)

    def prompt(self, given: str) -> str | list[dict[str, str]]:
        """Return what the model is asked for an input: a text, or a conversation."""
        turns = [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": given}]
        return turns[not self.system_prompt :] if self.task == "messages" else self.text(given)


def read(folder: Path) -> FinetuneFacts | None:
    """Return the facts in a run folder or an export, or None; raise UserError if the file has another form."""
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        return pydantic.TypeAdapter(FinetuneFacts).validate_json(path.read_bytes())
    except pydantic.ValidationError as error:
        if not any((folder / name).exists() for name in ("run.json", "manifest.json")):
            return None  # another program's
        rule = f"is not what a fine-tuning writes ({error.errors()[0]['msg']})"
        raise UserError(Fault(str(path), rule, remedy="run step 7 again with --redo")) from error


def conversations(folder: Path) -> list[dict[str, Any]]:
    """Read a run folder's conversations: ``messages``, ``prompt_ids`` (all before the last answer), ``answer_ids``."""
    path = folder / CONVERSATIONS_NAME
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.is_file() else []
