"""What an exported model says: a prompt continued greedily and by sampling with a seed, by stock transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from zerokara.tokenizer.encoder import Encoder

MAX_NEW_TOKENS = 60
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
SEED = 1234


@dataclass(frozen=True)
class Continuation:
    """One prompt and what follows, without the prompt."""

    prompt: str
    greedy: str
    sampled: str

    def as_json(self) -> dict[str, Any]:
        """All three texts."""
        return asdict(self)


def prompt_ids(encoder: Encoder, prompt: str) -> list[int]:
    """Ids of a prompt; an empty one starts a document, as in training: after the end of the one before."""
    return [int(token) for token in encoder.encode(prompt)] or [encoder.eos_id]


def continue_all(model: Any, encoder: Encoder, prompts: Sequence[str], seq_len: int) -> list[Continuation]:
    """Continue each prompt until the end of the document, `MAX_NEW_TOKENS`, or the longest text the model can read."""
    found = []
    for prompt in prompts:
        # A prompt that fills the model's reading length keeps its end.
        ids = prompt_ids(encoder, prompt)[-max(1, seq_len - MAX_NEW_TOKENS) :]
        greedy = _generate(model, encoder, ids, seq_len, do_sample=False)
        torch.manual_seed(SEED)
        sampled = _generate(model, encoder, ids, seq_len, **SAMPLING)
        found.append(Continuation(prompt, greedy, sampled))
    return found


def _generate(model: Any, encoder: Encoder, ids: list[int], seq_len: int, **settings: Any) -> str:
    ids_BS = torch.tensor([ids], device=model.device)
    new_tokens = min(MAX_NEW_TOKENS, seq_len - len(ids))
    output = model.generate(ids_BS, attention_mask=torch.ones_like(ids_BS), max_new_tokens=new_tokens, **settings)
    return encoder.decode(output[0, len(ids) :].tolist())
