"""Step 7: fine-tune a Hugging Face model on examples of a task, in the same engine as step 3.

In: a Hugging Face folder, and conversations, prompts and completions, sources and targets, or texts and labels. Out: a
run folder as of step 3, which steps 4 to 6 take. Only answers are learned; a validation measures the task's metric in
answers that the model generates, the best checkpoint by it is kept, and the test examples are read once, at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from zerokara.config.finetune_config import FinetuneConfig
from zerokara.steps import command, train
from zerokara.training import finetuning
from zerokara.training.processes import launcher, leaving

DEFAULT_CONFIG = "finetune_config.yaml"
MODULE = "zerokara.steps.finetune"
TITLE = "step 7 finetune"


def main(argv: Sequence[str]) -> int:
    """Entry point of the step."""
    doc = __doc__ or ""
    if launcher.is_training_process():
        return command.run(
            _work,
            argv,
            FinetuneConfig,
            DEFAULT_CONFIG,
            doc,
            is_part=True,
            evaluate=train.EVALUATE_HELP,
            test=train.TEST_HELP,
        )
    return command.run(
        lambda config, options: _launch(config, options, argv),
        argv,
        FinetuneConfig,
        DEFAULT_CONFIG,
        doc,
        verify_resume=train.VERIFY_HELP,
        evaluate=train.EVALUATE_HELP,
        redo=train.REDO_HELP,
        join=train.JOIN_HELP,
        host=train.HOST_HELP,
    )


def _launch(config: FinetuneConfig, options: command.Options, argv: Sequence[str]) -> None:
    """Prepare the examples, and train as step 3 does."""
    run_config = finetuning.prepared(finetuning.with_model(config), options.redo)
    train.launch(run_config, options, argv, train.StepNames(MODULE, TITLE, DEFAULT_CONFIG))


def _work(config: FinetuneConfig, options: command.Options) -> None:
    """Be a training process: the examples are there."""
    run_config = finetuning.with_model(config)
    train.work(finetuning.with_examples(run_config, finetuning.ExampleFiles.read(config.output_prefix)), options)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if launcher.is_training_process():
        leaving.leave(code)
    sys.exit(code)
