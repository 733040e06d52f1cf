"""A model and a person: texts or turns of a chat → what the model writes, printed while it writes.

The model stops and draws its tokens as its own generation_config.json says; where that names no sampling, as after a
pretraining, by the settings of the samples that step 4 prints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from zerokara.errors import RunError
from zerokara.evaluation import answers
from zerokara.evaluation.models import LoadedModel
from zerokara.huggingface import generation
from zerokara.huggingface.proof import SAMPLING

RESET = "reset"
"""Line that begins a new conversation."""


@dataclass
class Conversation:
    """What has been said so far."""

    model: LoadedModel
    max_new_tokens: int
    temperature: float | None = None
    """In place of the model's own; 0 takes the arg max."""
    as_text: bool = False
    """Continue each text, though the model has a chat template."""
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def converses(self) -> bool:
        """True if each text is a turn of the user, and what the model writes its answer."""
        return bool(self.model.tokenizer.chat_template) and not self.as_text

    @property
    def drawing(self) -> dict[str, Any]:
        """Settings of `generate` in place of the model's own."""
        if self.temperature == 0:
            return {"do_sample": False}
        chosen = {} if self.temperature is None else {"temperature": self.temperature}
        if not self.model.model.generation_config.do_sample:
            chosen = {"temperature": SAMPLING.temperature, "top_p": SAMPLING.top_p, **chosen}
        return {"do_sample": True, **chosen}

    def write(self, text: str) -> str:
        """Print what the model writes after `text`, and return it.

        The oldest turns of a conversation beyond the context length are forgotten; of a text its beginning is.
        """
        model, tokenizer = self.model.model, self.model.tokenizer
        is_encoder_decoder, ends = self.model.is_encoder_decoder, answers.end_ids(model, tokenizer)
        limit, room = self.max_new_tokens, generation.context_length(model)
        if room is not None:
            limit = min(limit, max(1, room // 2))
        self.turns.append({"role": "user", "content": text})
        while True:
            prompt = self.turns if self.converses else text
            ids = answers.prompt_ids(tokenizer, prompt, is_encoder_decoder, ends)
            if room is None or len(ids) + limit <= room + 1 or not self.converses or len(self.turns) < 3:
                break
            del self.turns[:2]
        ids = ids if room is None else ids[-(room + 1 - limit) :]
        if not ids:
            raise RunError("the tokenizer makes no token of an empty text, which the model could continue")
        ids_BS = torch.tensor([ids], device=model.device)
        # An encoder-decoder's sentinel tokens tell which masked span the text after them fills.
        streamer = transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=not is_encoder_decoder)
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
        fixed = {"max_new_tokens": limit, "eos_token_id": ends, "pad_token_id": pad_id, "streamer": streamer}
        with torch.inference_mode():
            output_BT = model.generate(ids_BS, attention_mask=torch.ones_like(ids_BS), **fixed, **self.drawing)
        new = output_BT[0, 1 if is_encoder_decoder else len(ids) :].tolist()
        if new[-1] not in ends:
            print("… (cut at the limit)")
        written = str(tokenizer.decode(new, skip_special_tokens=True))
        self.turns.append({"role": "assistant", "content": written})
        return written
