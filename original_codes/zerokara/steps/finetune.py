"""Step 7: fine-tune a Hugging Face model on examples of a task, in the same engine as step 3.

In: a Hugging Face folder, and conversations, prompts and completions, sources and targets, or texts and labels. Out: a
run folder as of step 3, for steps 4 to 6. Only answers are learned; the best checkpoint by the task's metric is kept,
and the test examples are read once, at the end.
"""

from functools import partial

from zerokara.config.finetune_config import FinetuneConfig
from zerokara.finetuning.task import FINETUNING, prepared
from zerokara.steps import command, preflight, train


def finetune(config: FinetuneConfig, options: command.Options) -> None:
    """Prepare the examples, and train as step 3 does."""
    preflight.check(config, preflight.of_examples(config))
    train.step(prepared(config, options.redo), options, FINETUNING)


main = partial(command.run, "7_finetune.sh", finetune, __doc__, **train.HELP)
