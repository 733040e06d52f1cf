"""A training process of a fine-tuning: ``python -m zerokara.finetuning.worker PLAN WORK``; see `training.worker`.

Beside the loss it validates with the task's metric, of answers that the model generates; ``test CHECKPOINT`` answers
the test examples. The stock Hugging Face model is built from the run's weights and generates with its key-value cache,
so that the number is that of the exported model. Each data-parallel rank answers its share of the examples.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import orjson
import torch.distributed

from zerokara import checkpoint
from zerokara.base.durable import write_file, write_json
from zerokara.base.progress import Progress
from zerokara.config.finetune_config import FinetuneRunConfig
from zerokara.evaluation import scoring
from zerokara.examples.example_files import ExampleFiles, Split, read_task_examples
from zerokara.finetuning.task import ANSWERS_NAME, FINETUNING, RESULT_NAME
from zerokara.huggingface.families import SpecialIds, stock_model_of
from zerokara.huggingface.generation import Generated, generate
from zerokara.model import parallel
from zerokara.training import worker
from zerokara.training.compute.engine import master_weights
from zerokara.training.loop import Trainer
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.processes import supervision
from zerokara.training.processes.joining import Processes, join
from zerokara.training.sample_texts import excerpt
from zerokara.training.validation import GiveUp, LossValidation, Validation, ValidationResult, load_checkpoint, of_loss


class TaskValidation:
    """Validation on the examples of one split, of which this process answers its share."""

    def __init__(self, plan: RunPlan, processes: Processes, split: Split, num_examples: int | None = None):
        """Take the first `num_examples` of a random order, all of them with None."""
        self._config = config = cast(FinetuneRunConfig, plan.resolved)
        self._plan, self._processes, self._split = plan, processes, split
        files = ExampleFiles.read(config.output_prefix)
        examples = read_task_examples(files.splits[split], num_examples, config.seed)
        self.references = [reference for _, reference in examples]
        self.answers: list[tuple[str, str]] = []  # the newest, each after its reference
        self.own_prompts = [prompt for prompt, _ in examples[parallel.data_rank() :: parallel.data_size()]]
        self._max_new_tokens = files.max_new_tokens if config.max_new_tokens == "auto" else config.max_new_tokens
        self._end_ids = files.end_ids

    def __call__(
        self, weights: Iterable[tuple[str, torch.Tensor]], give_up: GiveUp = None, progress: Progress | None = None
    ) -> ValidationResult | None:
        """Answer the examples with `weights` (all, unpartitioned, by name); every process must call it.

        `give_up` is called before each batch. `progress` advances by one for each answer of this process.
        """
        # On the device one after another: they may be the training's own, gathered for this moment only.
        dtype = torch.bfloat16 if self._config.number_format == "bf16" else torch.float32
        device, encoder = self._processes.device, self._plan.encoder
        copies = {name: tensor.detach().to(device, dtype, copy=True) for name, tensor in weights}
        special = SpecialIds(encoder.bos_id if encoder.bos_id >= 0 else None, encoder.eos_id, encoder.pad_id)
        model = stock_model_of(self._plan.shape, copies, special, self._config.number_format, device)
        del copies
        own = self.answer(model, give_up, progress)
        del model
        if own is None:
            return None
        # One row an example: whether it stopped, its length, its ids. Tensor-parallel ranks answer alike: one counts.
        table = torch.zeros(len(self.references), 2 + self._max_new_tokens, dtype=torch.int64)
        if parallel.tensor_rank() == 0:
            for row, answer in zip(table[parallel.data_rank() :: parallel.data_size()], own, strict=True):
                row[0], row[1] = answer.stopped, len(answer.ids)
                row[2 : 2 + len(answer.ids)] = torch.tensor(answer.ids, dtype=torch.int64)
        torch.distributed.all_reduce(table, group=self._processes.host_group)
        return self.scored([Generated(row[2 : 2 + row[1]], bool(row[0])) for row in table.tolist()])

    def answer(self, model: Any, give_up: GiveUp = None, progress: Progress | None = None) -> list[Generated] | None:
        """Answer this process's examples, in batches whose number is the same in every process."""
        prompts, size = self.own_prompts, self._config.eval_batch_size
        # By length over all batches: rows of a batch wait for the longest.
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
        answers: dict[int, Generated] = {}
        for start in range(0, -(-len(self.references) // parallel.data_size()), size):
            if give_up is not None and give_up():
                return None
            if part := order[start : start + size]:
                found = generate(
                    model,
                    [prompts[number] for number in part],
                    max_new_tokens=self._max_new_tokens,
                    end_ids=self._end_ids,
                    pad_id=self._plan.encoder.pad_id,
                    progress=progress,
                )
                answers |= zip(part, found, strict=True)
        return [answers[number] for number in range(len(prompts))]

    def scored(self, answers: Sequence[Generated]) -> ValidationResult:
        """Score the answers to all examples, and keep their texts."""
        encoder, split, metric = self._plan.encoder, self._split, self._config.metric
        # <unk> is a special token of the export, which leaves those out of a text; SentencePiece writes ⁇ for it.
        texts = [encoder.decode([token for token in answer.ids if token != encoder.unk_id]) for answer in answers]
        self.answers = list(zip(self.references, texts, strict=True))
        measure = scoring.METRICS[metric](texts, self.references)
        value, interval = measure.value, measure.interval()
        stopped = sum(answer.stopped for answer in answers) / max(1, len(answers))
        line = {
            f"{split}_{metric}": value,
            f"{split}_{metric}_interval": list(interval) if interval else None,
            f"{split}_examples": len(answers),
            f"{split}_stopped": stopped,
        }
        within = f" ({interval.low:.4f} to {interval.high:.4f})" if interval else ""
        messages = [f"{split}_{metric} {value:.4f}{within}  {len(answers):,} examples, {stopped:.1%} end by themselves"]
        messages += [f"  {excerpt(reference, 60)} ⟪{excerpt(text, 60)}⟫" for reference, text in self.answers[:3]]
        return ValidationResult(line, {f"{split}_{metric}": value}, -value, messages)


def validations(plan: RunPlan, processes: Processes) -> list[Validation]:
    """Return the validations of a fine-tuning: of the loss, and of the task's metric, which chooses the best."""
    config = cast(FinetuneRunConfig, plan.resolved)
    found = of_loss(plan, processes)
    if found and config.metric != "loss":
        task = TaskValidation(plan, processes, "valid", None if config.eval_examples == "all" else config.eval_examples)
        found.append(lambda engine, give_up: task(master_weights(engine), give_up))
    return found


def test(plan: RunPlan, folder: Path) -> None:
    """Answer the test examples with a checkpoint; every training process calls it, the first one writes."""
    config = cast(FinetuneRunConfig, plan.resolved)
    files, processes = ExampleFiles.read(config.output_prefix), join(plan)
    checkpoint.check(folder)
    loss = LossValidation(plan, processes.device, files.splits["test"].prefix)(load_checkpoint(plan, folder, processes))
    assert loss is not None
    found: dict[str, Any] = {
        "checkpoint": folder.name,
        "step": checkpoint.read_state(folder).step,
        "test_examples": files.splits["test"].num_examples,
        "test_sha256": files.splits["test"].sha256,
        "test_loss": loss.line["valid_loss"],
        "test_learned_tokens": loss.line["valid_tokens"],
    }
    if config.metric != "loss":
        task = TaskValidation(plan, processes, "test")
        with Progress("answers", len(task.own_prompts), "example") if processes.is_first else nullcontext() as progress:
            result = task(checkpoint.read_weights(folder).items(), progress=progress)
        assert result is not None
        found |= result.line | {"metric": config.metric}
        if files.labels:  # an answer that is no label's text counts as wrong
            found["unmatched"] = len(scoring.unmatched([text for _, text in task.answers], files.labels))
        if processes.is_first:
            lines = [orjson.dumps({"reference": one, "answer": other}) + b"\n" for one, other in task.answers]
            write_file(plan.run_dir / ANSWERS_NAME, b"".join(lines))
    if processes.is_first:
        write_json(plan.run_dir / RESULT_NAME, found)


WORK: dict[str, Callable[..., None]] = {
    **worker.WORK,
    "train": lambda plan: Trainer(plan, validations).train(),
    "test": lambda plan, folder: test(plan, Path(folder)),
}


main = partial(worker.main, task=FINETUNING, work=WORK)

if __name__ == "__main__":
    supervision.leave(main(sys.argv[1:]))
