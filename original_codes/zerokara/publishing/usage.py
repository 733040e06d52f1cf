"""The lines of Python with which anyone uses an exported model: in the model card, and after an upload.

No pipeline: transformers 5 has none for encoder-decoders. The lines run under transformers 4 and 5 alike.
"""

from __future__ import annotations

import json
import shlex
from typing import Any


def snippet(model: dict[str, Any], name: str, prompt: str) -> list[str]:
    """Statements, one a line, that load `name` and print what it generates; `model` are the facts of that name."""
    auto_class, is_encoder_decoder = model["auto_class"], model["task"] != "text-generation"
    return [
        f"from transformers import {auto_class}, AutoTokenizer",
        f"name = {json.dumps(name, ensure_ascii=False)}",
        "tokenizer = AutoTokenizer.from_pretrained(name)",
        f"model = {auto_class}.from_pretrained(name)",
        f'inputs = tokenizer({json.dumps(prompt, ensure_ascii=False)}, return_tensors="pt")',
        "output = model.generate(**inputs, max_new_tokens=50, do_sample=True, top_p=0.95)",
        # Sentinel tokens are special tokens, and tell which masked span the text after them fills.
        f"print(tokenizer.decode(output[0], skip_special_tokens={not is_encoder_decoder}))",
    ]


def command(model: dict[str, Any], name: str, prompt: str) -> str:
    """The same as one shell command."""
    return f"python -c {shlex.quote('; '.join(snippet(model, name, prompt)))}"
