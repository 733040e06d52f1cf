"""Step 5 from the command line: a text or a chat → what the exported model writes (`5_generate.py`).

    python 5_generate.py "Once upon a time"     continues the text, or answers it if the export has a chat template
    python 5_generate.py                        reads prompts line by line; `reset` restarts a chat, an empty line ends

The export's generation_config.json says where a text ends and how tokens are drawn. Another Hugging Face folder:
--set output_tokenizer_and_model_dir=FOLDER
"""

import io
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from zerokara.base.errors import Fault, UserError
from zerokara.base.progress import log
from zerokara.config.convert_config import ConvertConfig
from zerokara.evaluation import answers, inputs
from zerokara.examples import facts
from zerokara.examples.formats import Message, with_system
from zerokara.steps import command

TOKENS = 200
HELP = {
    "redo": "",
    "prompt": "text to continue, or to answer; without one, each line that is typed",
    "tokens": f"most tokens to write at once (default {TOKENS})",
    "temperature": "sampling temperature, in place of the export's own; 0 is greedy (the arg max)",
    "seed": "the same seed gives the same text",
}


def generate(config: ConvertConfig, options: command.Options) -> None:
    """Load the export, and write until there is no further text."""
    folder = Path(config.output_tokenizer_and_model_dir)
    if fault := inputs.check_folder(folder):
        raise UserError(config.fault("output_tokenizer_and_model_dir", fault.rule, f"{fault.remedy}, or run step 4"))
    if options.dry_run:
        print(f"dry run: {folder} would be loaded")
        return
    import torch  # this is the border: the configuration has been checked

    from zerokara.evaluation.models import open_models
    from zerokara.huggingface.proof import SAMPLING

    (model,) = open_models([folder], precision="auto")
    torch.manual_seed(torch.seed() if options.seed is None else options.seed)
    own, settings = model.model.generation_config.to_diff_dict(), dict[str, Any]()
    converses, turns, tuned = bool(model.tokenizer.chat_template), list[Message](), facts.read(folder)
    is_scored = tuned and not converses  # by its most likely answers
    if is_scored and not options.temperature:
        settings = {"do_sample": False, "repetition_penalty": 1.0}
    elif not own.get("do_sample"):  # drawn as step 4's samples are
        settings = {"do_sample": True, "top_k": 0, **SAMPLING}
    if options.temperature is not None:
        settings = {**settings, "temperature": options.temperature} if options.temperature else {"do_sample": False}
    unused = () if {**own, **settings}.get("do_sample") else ("temperature", "top_k", "top_p")
    shown = {key: value for key, value in (own | settings).items() if not key.endswith(("_id", "_version", *unused))}
    named = [f"{key} {value}" for key, value in shown.items()]
    log(f"step 5 generate: {folder}, {', '.join(named) or 'greedy'}")
    typed = _typed("user ▶ " if converses else "text ▶ ")
    for text in typed if options.prompt is None else [options.prompt]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(Fault("the prompt", "must be UTF-8", value=ascii(text[error.start : error.end]))) from None
        if text == "reset" and options.prompt is None:
            turns.clear()
        elif converses:
            turns.append({"role": "user", "content": text})
            asked = with_system(turns, tuned.system_prompt if tuned else "")
            answer = answers.stream(model, asked, int(options.tokens or TOKENS), settings)
            turns.append({"role": "assistant", "content": answer})
        else:
            text = tuned.text(text) if tuned else text
            print("" if model.is_encoder_decoder else text, end="", flush=True)
            answers.stream(model, text, int(options.tokens or TOKENS), settings, continues=not tuned)


def _typed(asked: str) -> Iterator[str]:
    """Lines from the keyboard or a file, until an empty one."""
    if isinstance(sys.stdin, io.TextIOWrapper):  # what is no UTF-8 is told with the prompt
        sys.stdin.reconfigure(errors="surrogateescape")
    with suppress(EOFError):
        while line := input(asked if sys.stdin.isatty() else ""):
            yield line


main = partial(command.run, "5_generate.py", generate, __doc__, **HELP)
