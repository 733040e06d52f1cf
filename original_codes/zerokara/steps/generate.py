"""Step 5 from the command line: a text or a chat → what the exported model writes (`5_generate.py`).

    python 5_generate.py "Once upon a time"     continues the text, or answers it if the export has a chat template
    python 5_generate.py                        asks for line after line; `reset` begins anew, an empty line ends

The export's generation_config.json says where a text ends and how tokens are drawn. Another Hugging Face folder:
--set output_tokenizer_and_model_dir=FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from zerokara.config.convert_config import ConvertConfig
from zerokara.errors import UserError
from zerokara.evaluation import inputs
from zerokara.progress import log
from zerokara.steps import command

TOKENS = 200
FLAGS = {
    "redo": "",
    "prompt": "text to continue, or to answer; without one, each line that is typed",
    "tokens": f"most tokens to write at once (default {TOKENS})",
    "temperature": "in place of the export's own; 0 always takes the likeliest token",
    "seed": "the same seed gives the same text",
    "text": "continue the text, though the export has a chat template",
}


def generate(config: ConvertConfig, options: command.Options) -> None:
    """Load the export, and write until there is no further text."""
    folder = Path(config.output_tokenizer_and_model_dir)
    if fault := inputs.check_folder(folder):
        raise UserError(config.fault("output_tokenizer_and_model_dir", fault.rule, "run step 4, or name its folder"))
    if options.dry_run:
        print(f"dry run: {folder} would be loaded")
        return
    import torch  # this is the border: the configuration has been checked

    from zerokara.evaluation.conversation import RESET, Conversation
    from zerokara.evaluation.models import open_models

    (model,) = open_models([folder])
    torch.manual_seed(torch.seed() if options.seed is None else options.seed)
    said = Conversation(model, int(options.tokens or TOKENS), options.temperature, options.text)
    own, drawing = model.model.generation_config.to_diff_dict(), said.drawing
    named = {key: own[key] for key in ("temperature", "top_p", "top_k", "repetition_penalty") if own.get(key)} | drawing
    how = ", ".join(f"{key} {value}" for key, value in named.items() if key != "do_sample")
    log(f"step 5 generate: {folder}, {how if drawing['do_sample'] else 'always the likeliest token'}")
    for text in [options.prompt] if options.prompt else _typed(said.converses):
        if text == RESET and not options.prompt:
            said.turns.clear()
            continue
        if not said.converses and not model.is_encoder_decoder:
            print(text, end="", flush=True)
        said.write(text)


def _typed(converses: bool) -> Iterator[str]:
    """Lines from the keyboard, until an empty one, or all lines of a file."""
    is_typed = sys.stdin.isatty()
    while True:
        if is_typed:
            print("user ▶ " if converses else "text ▶ ", end="", flush=True)
        line = sys.stdin.readline()
        if not line.strip() and (is_typed or not line):
            return
        yield line.rstrip("\n")


main = partial(command.run, "5_generate.py", generate, __doc__, **FLAGS)
