"""Prompts → continuations, in batches, with stock transformers' key-value cache: greedy, or sampled.

In: any transformers model that generates (decoder or encoder-decoder), and prompts as ids. Out: for each prompt, in its
order, the new ids up to the first end token, and whether the model ended by itself.

Greedy results do not depend on the batches, but for the rounding of two logits that are equal: padding is masked, and a
decoder's stands on the left, so that the last position of each row is the last token of its prompt. An encoder's stands
on the right, where learned positions need it. The model's own generation settings are not used: a repetition penalty or
a second end token would change what is measured.

Shape suffixes: B batch, S longest prompt, R longest input of an encoder, T new tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from zerokara.base.errors import RunError
from zerokara.base.progress import Progress
from zerokara.samples.objective import Prompt

BATCH_TOKENS = 16_384
"""Most rows × (longest prompt + new tokens) of a batch; a longer prompt is a batch of its own. A token's keys and
values are 2 · layers · kv heads · head_dim numbers: in a model of 6 layers and 384 dimensions 18 kB of fp32, 300 MB for
a batch."""
MAX_BATCH_SIZE = 256
"""A batch runs until its last row has ended; more rows gain little, and wait longer for that one."""
_SEED = 1234


@dataclass(frozen=True)
class Generated:
    """A model's continuation of one prompt."""

    ids: list[int]
    """New ids, without the prompt and without the end token."""
    stopped: bool
    """True if it ended with an end token, False if it was cut at its limit."""


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end_ids: Sequence[int],
    pad_id: int,
    sampling: Mapping[str, float] | None = None,
    progress: Progress | None = None,
) -> list[Generated]:
    """Continue each prompt.

    For an encoder-decoder a prompt is the encoder's input, with its end token; else it is what stands before the first
    new token. A decoder's context length limits `max_new_tokens` further. Without `end_ids` nothing ends before its
    limit. `sampling` are the settings (`temperature`, `top_p`) to draw tokens by, instead of the arg max. `progress`
    advances by one for each prompt.

    Raises:
        RunError: a prompt is empty, or longer than the context; names its number, counted from 0.
    """
    assert not model.training, "dropout would make the result random"
    limits = [max_new_tokens] * len(prompts)
    if (context := context_length(model)) is not None:
        # An encoder-decoder has positions for each; its decoder has read a start token.
        taken = (1 if model.config.is_encoder_decoder and len(prompt) <= context else len(prompt) for prompt in prompts)
        limits = [min(max_new_tokens, context + 1 - length) for length in taken]
    for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        if not len(prompt) or limit < 1:
            longest = "" if context is None else f", and no more than the context length, {context}"
            raise RunError(f"prompt {number} has {len(prompt)} tokens; a prompt must have at least one{longest}")
    results: dict[int, Generated] = {}
    with _settings(model, end_ids, pad_id, sampling), torch.inference_mode():
        for batch in _batches(list(map(len, prompts)), limits, None if model.config.is_encoder_decoder else context):
            written = _continued(model, [prompts[number] for number in batch], limits[batch[-1]], pad_id)
            for number, new in zip(batch, written, strict=True):
                ids = list(takewhile(lambda token: token not in end_ids, new[: limits[number]]))
                results[number] = Generated(ids, stopped=len(ids) < limits[number])
            if progress is not None:
                progress.advance(len(batch))
    return [results[number] for number in range(len(prompts))]


def context_length(model: Any) -> int | None:
    """Maximum tokens that the model reads; None where its positions are relative (T5).

    Prompt and answer may have one more together, each where it has its own positions (BART): the last new token is
    written and not read.
    """
    return getattr(model.config, "max_position_embeddings", None)


def _batches(lengths: Sequence[int], limits: Sequence[int], context: int | None) -> Iterator[list[int]]:
    """Numbers of prompts of like lengths, the longest first: what needs most memory runs first."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if batch:
            # A whole batch takes as many steps as its row with the highest limit: the shortest, which is its last.
            length = lengths[batch[0]] + limits[number]
            full = len(batch) >= MAX_BATCH_SIZE or length * (len(batch) + 1) > BATCH_TOKENS
            # A row that has ended is computed on; learned positions have none after the last.
            if full or (context is not None and length > context + 1):
                yield batch
                batch = []
        batch.append(number)
    if batch:
        yield batch


def _continued(model: Any, prompts: Sequence[Sequence[int]], limit: int, pad_id: int) -> list[list[int]]:
    """New ids of each row [B, T], after an end token followed by anything."""
    is_encoder_decoder = model.config.is_encoder_decoder
    tokens_BS, mask_BS = padded(prompts, pad_id, left=not is_encoder_decoder)
    output = model.generate(tokens_BS.to(model.device), attention_mask=mask_BS.to(model.device), max_new_tokens=limit)
    first = 1 if is_encoder_decoder else tokens_BS.shape[1]  # after the decoder's start token, or the prompt
    return output[:, first:].tolist()


def padded(prompts: Sequence[Sequence[int]], pad_id: int, left: bool) -> tuple[Tensor, Tensor]:
    """Ids [B, S] and attention mask [B, S], 0 on the padding, which stands before the prompts or after them."""
    rows, side = [torch.tensor(prompt) for prompt in prompts], "left" if left else "right"
    tokens_BS = pad_sequence(rows, batch_first=True, padding_value=pad_id, padding_side=side)
    mask_BS = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
    return tokens_BS, mask_BS


def arguments(
    texts: Sequence[Prompt], device: torch.device, mask_name: str, decoder_name: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Ids [B, S] of a decoder; or an encoder's ids [B, R], and by name their mask and the decoder's ids [B, S].

    Padding has no effect on the logits before it: it is after the ids of a causal decoder, and masked in an encoder's.
    """
    tokens_BS, _ = padded([text.decoder_ids for text in texts], 0, left=False)
    if not texts[0].encoder_ids:
        return tokens_BS.to(device), {}
    encoder_BR, mask_BR = padded([text.encoder_ids for text in texts], 0, left=False)
    return encoder_BR.to(device), {mask_name: mask_BR.to(device), decoder_name: tokens_BS.to(device)}


@contextmanager
def _settings(model: Any, end_ids: Sequence[int], pad_id: int, sampling: Mapping[str, float] | None) -> Iterator[None]:
    """Give the model these settings alone; transformers' `generate` merges its arguments with the model's own."""
    from transformers import GenerationConfig

    own = model.generation_config
    start = getattr(own, "decoder_start_token_id", None)
    model.generation_config = GenerationConfig(
        do_sample=sampling is not None,
        use_cache=True,
        eos_token_id=list(end_ids) or None,
        pad_token_id=pad_id,
        # Newer files have it in generation_config.json, older ones in config.json.
        decoder_start_token_id=getattr(model.config, "decoder_start_token_id", None) if start is None else start,
        **({"top_k": 0, **sampling} if sampling else {}),
    )
    try:
        with torch.random.fork_rng(enabled=sampling is not None):
            if sampling is not None:
                torch.manual_seed(_SEED)
            yield
    finally:
        model.generation_config = own
