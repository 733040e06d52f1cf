"""The metric of a task, of answers that the model generates: at each validation, and on the test examples at the end.

The stock Hugging Face model is built from the run's weights, and generates with its key-value cache, so that the number
is what the exported model has. Each data-parallel rank answers its share of the examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import orjson
import torch
import torch.distributed
from torch import Tensor

from zerokara.config.finetune_config import FinetuneRunConfig
from zerokara.evaluation import metrics
from zerokara.evaluation.measures import Interval
from zerokara.examples import chat_template
from zerokara.examples.example_files import ExampleFiles
from zerokara.examples.facts import CHAT_TEMPLATE_NAME
from zerokara.examples.layout import Split
from zerokara.examples.task_examples import TaskExample, read_task_examples
from zerokara.huggingface.families import SpecialIds
from zerokara.huggingface.generation import Generated, generate
from zerokara.huggingface.live_model import stock_model_of
from zerokara.model import parallel
from zerokara.progress import Progress
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.processes.joining import Processes


@dataclass(frozen=True)
class TaskResult:
    """A metric of generated answers."""

    metric: str
    value: float
    interval: Interval | None
    """95 %, over the examples; None for a single one."""
    num_examples: int
    num_stopped: int
    """Answers that the model ended by itself."""
    higher_is_better: bool
    references: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    unmatched: int = 0
    """Answers that are no label's text, where the metric is one of labels; they count as wrong."""

    @property
    def badness(self) -> float:
        """The number that is least for the best result."""
        return -self.value if self.higher_is_better else self.value

    @property
    def stopped_share(self) -> float:
        """Share of the answers that the model ended by itself."""
        return self.num_stopped / max(1, self.num_examples)

    @property
    def interval_text(self) -> str:
        """The interval, for people."""
        return f" ({self.interval.low:.4f} to {self.interval.high:.4f})" if self.interval else ""

    def as_json(self, split: Split) -> dict[str, Any]:
        """The numbers of its line in metrics.jsonl."""
        return {
            f"{split}_{self.metric}": self.value,
            f"{split}_{self.metric}_interval": self.interval.as_json() if self.interval else None,
            f"{split}_examples": self.num_examples,
            f"{split}_stopped": self.stopped_share,
        }

    def answers_as_json_lines(self) -> bytes:
        """Every reference and answer."""
        pairs = zip(self.references, self.answers, strict=True)
        return b"".join(orjson.dumps({"reference": one, "answer": other}) + b"\n" for one, other in pairs)


class TaskEvaluation:
    """The examples of one split that this process answers."""

    def __init__(self, plan: RunPlan, processes: Processes, split: Split, num_examples: int | None = None):
        """Take the first `num_examples` of a random order, all of them with None."""
        config = plan.config
        assert isinstance(config, FinetuneRunConfig) and plan.data.examples is not None
        self._plan, self._processes, self._config, self._files = plan, processes, config, plan.data.examples
        examples = read_task_examples(self._files, split, num_examples, config.seed)
        self._all, self._own = examples, examples[parallel.data_rank() :: parallel.data_size()]
        self._most = self._files.max_new_tokens if config.max_new_tokens == "auto" else config.max_new_tokens
        self._ends = _end_ids(plan, self._files)

    def __call__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        give_up: Callable[[], bool] | None = None,
        progress: Progress | None = None,
    ) -> TaskResult | None:
        """Answer the examples with `weights` (all, unpartitioned, by name); every process must call it.

        `give_up` is called by every process before each batch, with the same answer in all; once it is True, the result
        is None. `progress` advances by one for each answer of this process.
        """
        # On the device one after another: they may be the training's own, gathered for this moment only.
        dtype = torch.bfloat16 if self._config.precision == "bf16" else torch.float32
        device = self._processes.device
        copies = {name: tensor.detach().to(device, dtype, copy=True) for name, tensor in weights}
        encoder, shape = self._plan.encoder, self._plan.shape
        special = SpecialIds(encoder.bos_id if encoder.bos_id >= 0 else None, encoder.eos_id, encoder.pad_id)
        model = stock_model_of(shape, copies, special, str(self._config.precision), device)
        del copies
        answers = self._answer(model, give_up, progress)
        del model
        return None if answers is None else self._score(self._gathered(answers))

    def _gathered(self, own: list[Generated]) -> list[Generated]:
        """The answers to all examples, in their order, from those of each process."""
        # One row an example: whether it stopped, its length, its ids. Tensor-parallel ranks answer alike: one counts.
        table = torch.zeros(len(self._all), 2 + self._most, dtype=torch.int64)
        if parallel.tensor_rank() == 0:
            for row, answer in zip(table[parallel.data_rank() :: parallel.data_size()], own, strict=True):
                row[0], row[1] = answer.stopped, len(answer.ids)
                row[2 : 2 + len(answer.ids)] = torch.tensor(answer.ids, dtype=torch.int64)
        torch.distributed.all_reduce(table, group=self._processes.host_group)
        return [Generated(row[2 : 2 + row[1]], bool(row[0])) for row in table.tolist()]

    @property
    def num_own(self) -> int:
        """Examples that this process answers."""
        return len(self._own)

    def _answer(
        self, model: Any, give_up: Callable[[], bool] | None, progress: Progress | None
    ) -> list[Generated] | None:
        """The answers to this process's examples, in batches whose number is the same in every process."""
        config, encoder = self._config, self._plan.encoder
        size, ranks = config.eval_batch_size, parallel.data_size()
        rounds = -(-len(self._all) // (size * ranks))
        answers: list[Generated] = []
        # By length over all rounds: rows of a batch wait for the longest.
        order = sorted(range(len(self._own)), key=lambda n: -len(self._own[n].prompt))
        for number in range(rounds):
            if give_up is not None and give_up():
                return None
            part = [self._own[n] for n in order[number * size : (number + 1) * size]]
            if not part:
                continue
            found = generate(
                model,
                [example.prompt for example in part],
                max_new_tokens=self._most,
                eos_id=self._ends,
                pad_id=encoder.pad_id,
                batch_size=size,
                progress=progress,
            )
            answers += found or []
        placed = dict(zip(order, answers, strict=True))
        return [placed[n] for n in range(len(self._own))]

    def _score(self, answers: list[Generated]) -> TaskResult:
        encoder = self._plan.encoder
        # <unk> is a special token of the export, which leaves those out of a text; SentencePiece writes ⁇ for it.
        outputs = [encoder.decode([token for token in answer.ids if token != encoder.unk_id]) for answer in answers]
        return score(
            self._config.metric, self._all, outputs, [answer.stopped for answer in answers], self._files.labels
        )


def _end_ids(plan: RunPlan, files: ExampleFiles) -> list[int]:
    """The ids at which an answer ends: a chat template may have one of its own beside </s>."""
    if files.chat_template is None:
        return [plan.encoder.eos_id]
    is_encoder_decoder = plan.shape.traits.is_encoder_decoder
    where = str(plan.run_dir / CHAT_TEMPLATE_NAME)
    template = chat_template.checked(files.chat_template, where, plan.encoder, is_encoder_decoder)
    return chat_template.end_ids(template, plan.encoder)


def score(
    metric: str, examples: list[TaskExample], outputs: list[str], stopped: list[bool], labels: list[str]
) -> TaskResult:
    """Score answers; `labels` are the texts of all labels, where the metric is one of labels."""
    references = [example.reference for example in examples]
    measure = metrics.METRICS[metric](outputs, references)
    is_of_labels = metric in ("accuracy", "macro_f1")
    return TaskResult(
        metric,
        measure.value,
        measure.interval(),
        len(examples),
        sum(stopped),
        measure.higher_is_better,
        tuple(references),
        tuple(outputs),
        len(metrics.unmatched(outputs, labels).indices) if is_of_labels else 0,
    )
