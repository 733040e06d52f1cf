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


def main(argv: Sequence[str]) -> int:
    """Entry point of the step."""
    return command.run(
        command.FINETUNE,
        lambda config, options: _launch(config, options, argv),
        __doc__,
        argv,
        verify_resume=train.VERIFY_HELP,
        evaluate=train.EVALUATE_HELP,
        redo=train.REDO_HELP,
        join=train.JOIN_HELP,
        host=train.HOST_HELP,
    )


def _launch(config: FinetuneConfig, options: command.Options, argv: Sequence[str]) -> None:
    """Prepare the examples, and train as step 3 does."""
    run_config = finetuning.prepared(finetuning.with_model(config), options.redo)
    train.launch(run_config, options, argv, "step 7 finetune")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
