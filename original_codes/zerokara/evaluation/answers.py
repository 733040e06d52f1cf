"""A Hugging Face model and prompts → its answers as text; blocks of prompts answered before come from the cache.

The prompt is encoded as the model's own tokenizer does by default: with `<s>` where the tokenizer adds one, with `</s>`
for an encoder, without one for a decoder, which continues the prompt. So a `</s>` that stands in a prompt is the token,
as it is in fine-tuning. Conversations go through the tokenizer's own chat template.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerokara.base.errors import RunError
from zerokara.base.progress import Progress, log
from zerokara.evaluation import cache as block_cache
from zerokara.evaluation.inputs import Prompt
from zerokara.examples.encoding import prompt_ids
from zerokara.examples.example_files import ANSWER_MARGIN

if TYPE_CHECKING:
    from zerokara.evaluation.models import LoadedModel

BLOCK_PROMPTS = 512
"""Prompts that are answered at once; a run that is killed loses no more."""
AS_WRITTEN = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
"""Settings to decode by: the text that a model wrote, as in its training; a folder may say to close up "oui , bien"."""
_MEASURED = 2_000
"""Expected answers, the longest by their characters, that are encoded to find the one with most tokens."""


@dataclass(frozen=True)
class Answers:
    """Answers of a model, in the order of the prompts."""

    outputs: list[str]
    stopped: list[bool]
    """True where the model ended by itself, and was not cut."""
    max_new_tokens: int
    num_too_long: int = 0
    """Prompts that are longer than the model's context: it is not asked, and its answer is empty."""
    note: str = ""
    """How the model was asked, where that is not as one would expect; or why it was not, and has no outputs."""


def answers_of(
    model: "LoadedModel",
    prompts: Sequence[Prompt],
    expected: Sequence[str],
    max_new_tokens: int | None,
    name: str,
    cache: Path | None = None,
) -> Answers:
    """Answers to the prompts of the task `name`, of `max_new_tokens` or as many as the `expected` ones have.

    Raises:
        RunError: the tokenizer has no end token, or no chat template for conversations.
    """
    limit = max_new_tokens or num_tokens_allowed(model.tokenizer, expected)
    asked_how = str(model.dtype), list(prompts), limit, BLOCK_PROMPTS, AS_WRITTEN
    folder = block_cache.folder_of(cache, model.content, *asked_how)
    outputs, stopped, num_too_long = list[str](), list[bool](), 0
    for index, start in enumerate(range(0, len(prompts), BLOCK_PROMPTS)):
        asked = prompts[start : start + BLOCK_PROMPTS]
        if kept := block_cache.read(folder, index):
            block = Answers(**kept)
        else:
            part = f", {start + 1:,} to {start + len(asked):,} of {len(prompts):,}" if len(asked) < len(prompts) else ""
            label = f"{name}, {model.name}{part}"
            block = answer(model.model, model.tokenizer, asked, max_new_tokens=limit, label=label)
            block_cache.write(folder, index, asdict(block))
        outputs += block.outputs
        stopped += block.stopped
        num_too_long += block.num_too_long
    return Answers(outputs, stopped, limit, num_too_long)


def answer(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], *, max_new_tokens: int, label: str = "generating answers"
) -> Answers:
    """Generate greedily an answer to each prompt. Raises as `answers_of`."""
    from zerokara.huggingface import generation  # torch: only once the configuration has been checked

    ends = end_ids(model, tokenizer)
    ids = [prompt_ids(tokenizer, prompt, model.config.is_encoder_decoder, ends) for prompt in prompts]
    context = generation.context_length(model)
    asked = [number for number, each in enumerate(ids) if context is None or len(each) <= context]
    outputs, stopped = [""] * len(ids), [False] * len(ids)
    with Progress(label, len(asked), unit="answer") as progress:
        generated = generation.generate(
            model,
            [ids[number] for number in asked],
            max_new_tokens=max_new_tokens,
            end_ids=ends,
            pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0],
            progress=progress,
        )
    for number, each in zip(asked, generated, strict=True):
        outputs[number] = str(tokenizer.decode(each.ids, **AS_WRITTEN)).strip()
        stopped[number] = each.stopped
    return Answers(outputs, stopped, max_new_tokens, len(ids) - len(asked))


class Printer:
    """Prints each character as `generate` writes it; transformers' own streamer waits for a space, which some scripts
    lack. With `continues`, the prompt is decoded, too, or the space after it would be lost."""

    def __init__(self, decode: Callable[[list[int]], str], continues: bool):
        self._decode, self._continues, self._ids, self._num_printed = decode, continues, list[int](), -1

    def put(self, ids: Any) -> None:
        first, self._ids = self._num_printed < 0, [*self._ids, *ids.flatten().tolist()]
        if first:  # the prompt
            self._ids = self._ids if self._continues else []
            self._num_printed = len(self._decode(self._ids))
        else:
            self._print(self._decode(self._ids).rstrip("\ufffd"))  # of a character that has begun

    def end(self) -> None:
        self._print(f"{self._decode(self._ids)}\n")

    def _print(self, text: str) -> None:
        print(text[self._num_printed :], end="", flush=True)
        self._num_printed = max(self._num_printed, len(text))


def stream(
    model: "LoadedModel", prompt: Prompt, max_new_tokens: int, settings: dict[str, Any], continues: bool = False
) -> str:
    """Print an answer while the model writes it, as its own generation settings and then `settings` say; return it.
    `continues` tells that it is no answer, but the rest of the text.

    If the turns leave less than half of the context for an answer, the oldest are dropped. If a text, or the last turn,
    leaves less than an eighth, its beginning is cut off. What is dropped is printed.
    """
    import torch

    tokenizer, context, is_encoder_decoder = model.tokenizer, model.context_length, model.is_encoder_decoder
    ends, wanted, given, notes = end_ids(model.model, tokenizer), min(max_new_tokens, context // 2), prompt, list[str]()
    wanted = 0 if is_encoder_decoder else wanted  # whose answers have positions of their own
    while len(ids := prompt_ids(tokenizer, prompt, is_encoder_decoder, ends)) > context - wanted:
        if isinstance(prompt, str) or len(prompt) < 3:
            break
        first = len(prompt) % 2 == 0  # a system turn, which stays
        prompt = [*prompt[:first], *prompt[first + 2 :]]
    if prompt is not given:
        notes.append(f"without the first {len(given) - len(prompt)} turns")
    if len(ids) > context - min(wanted, max(1, context // 8)):
        begins = ids[:1] if ids[0] == tokenizer.bos_token_id else []
        left = context - wanted - len(begins)
        notes.append(f"without the first {len(ids) - left - len(begins):,} of {len(ids):,} tokens of the prompt")
        ids = [*begins, *ids[-left:]]
    ids = ids or ends[:1]  # of an empty text: in training a document follows the end of another
    limit = min(max_new_tokens, context - (0 if is_encoder_decoder else len(ids)))
    ids_BS = torch.tensor([ids], device=model.device)
    # An encoder-decoder's sentinel tokens tell which masked span the text after them fills.
    shown = AS_WRITTEN | {"skip_special_tokens": not (is_encoder_decoder and continues)}
    streamer = Printer(partial(tokenizer.decode, **shown), continues)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
    fixed = {"streamer": streamer, "max_new_tokens": limit, "eos_token_id": ends, "pad_token_id": pad_id}
    with torch.inference_mode():
        output_BT = model.model.generate(ids_BS, attention_mask=torch.ones_like(ids_BS), **fixed, **settings)
    new = output_BT[0, 1 if is_encoder_decoder else len(ids) :].tolist()
    if notes := [*(["cut at the limit"] if new[-1] not in ends else []), *notes]:
        log(f"… ({'; '.join(notes)})")
    return str(tokenizer.decode(new, **AS_WRITTEN))


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """The ids that end an answer: those of generation_config.json, else the tokenizer's end token."""
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None or ends == [] else ends
    if ends is None:
        raise RunError("the model has no end token (eos_token_id), so no answer of it ever ends")
    return [ends] if isinstance(ends, int) else list(ends)


def num_tokens_allowed(tokenizer: Any, expected: Sequence[str]) -> int:
    """Maximum new tokens for answers like the `expected` ones: a quarter more than the longest has, and its end."""
    longest = sorted(set(expected), key=len, reverse=True)[:_MEASURED]
    most = max((len(tokenizer(text, split_special_tokens=True)["input_ids"]) for text in longest), default=1)
    return ceil(ANSWER_MARGIN * most) + 1
