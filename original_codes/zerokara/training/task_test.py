"""The test of a fine-tuning: its test examples are read once, at the end, with the best checkpoint.

The result goes into ``test_result.json`` in the run folder. Where that is there nobody reads the examples again, unless
the run was made longer since and another checkpoint is the best.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import orjson

from zerokara import checkpoint
from zerokara.config.finetune_config import FinetuneRunConfig
from zerokara.durable import ASIDE_ENDING, unused_name, write_bytes, write_json
from zerokara.errors import RunError
from zerokara.progress import Progress, log, opening
from zerokara.training import finetune_record
from zerokara.training.finetune_record import ANSWERS_NAME, RESULT_NAME
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.spawning import Commands, spawn


def run(plan: RunPlan, commands: Commands, newest: Path) -> None:
    """Test the best checkpoint of a finished run in training processes, unless that was done.

    Raises:
        RunError: the test failed; the run is complete all the same, and the same command tests again.
    """
    examples = plan.data.examples
    if examples is None:
        return
    tested = checkpoint.best(plan.run_dir) or newest
    if examples.test is not None and not _is_tested(plan, tested):
        _read_test_examples(plan, commands, tested, examples.test.num_examples)
    finetune_record.write(plan)


def _is_tested(plan: RunPlan, folder: Path) -> bool:
    """Whether the result is there. That of another checkpoint, of before the run was made longer, is set aside."""
    path = plan.run_dir / RESULT_NAME
    if not path.exists():
        return False
    found = orjson.loads(path.read_bytes())
    assert isinstance(plan.config, FinetuneRunConfig)
    if found["checkpoint"] == folder.name and found.get("metric", "loss") == plan.config.metric:
        return True
    for name in (RESULT_NAME, ANSWERS_NAME):
        made = plan.run_dir / name
        if made.exists():
            made.rename(unused_name(made.with_stem(f"{made.stem}_{found['checkpoint']}"), ASIDE_ENDING))
    log(f"the test examples were read before, with {found['checkpoint']}: that result is kept under another name")
    return False


def _read_test_examples(plan: RunPlan, commands: Commands, folder: Path, num_examples: int) -> None:
    opening(f"{commands.title}: reading the {num_examples:,} test examples, once, with {folder.name}")
    if code := spawn(plan, "test", str(folder)):
        raise RunError(f"the test ended with exit code {code}; the messages above say why. To test: {commands.resume}")


def test(plan: RunPlan, folder: Path) -> None:
    """Answer the test examples with a checkpoint; every training process calls it, the first one writes."""
    from zerokara.training.evaluation import Validation, load_checkpoint
    from zerokara.training.run import join
    from zerokara.training.task_evaluation import TaskEvaluation

    examples = plan.data.examples
    assert isinstance(plan.config, FinetuneRunConfig) and examples is not None and examples.test is not None
    processes = join(plan)
    checkpoint.check(folder)
    found: dict[str, Any] = {"checkpoint": folder.name, "step": checkpoint.read_state(folder).step}
    validation = Validation(plan, processes.device, examples.test.prefix)
    loss = validation(load_checkpoint(plan, folder, processes))
    assert loss is not None
    found |= {"test_loss": loss.whole.loss, "test_learned_tokens": loss.whole.num_tokens}
    if plan.config.metric != "loss":
        task = TaskEvaluation(plan, processes, "test")
        with Progress("answers", task.num_own, "example") if processes.is_first else nullcontext() as progress:
            result = task(checkpoint.read_weights(folder).items(), progress=progress)
        assert result is not None
        found |= result.as_json("test") | {"metric": result.metric, "unmatched": result.unmatched}
        if processes.is_first:
            write_bytes(plan.run_dir / ANSWERS_NAME, result.answers_as_json_lines())
    if processes.is_first:
        write_json(plan.run_dir / RESULT_NAME, found)
