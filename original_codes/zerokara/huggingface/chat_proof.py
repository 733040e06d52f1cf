"""Proof that inference equals training in a chat: the export gives the ids that training learned of its conversations.

In: the exported folder, and conversations of the training data with their ids, as step 7 left them in the run folder.
Out: a `Proof`, without which the export fails. Of each conversation two things must be equal, both from stock
``AutoTokenizer.apply_chat_template``: the ids up to the end of the last answer, and the ids after which that answer is
generated (``add_generation_prompt``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from zerokara.huggingface import tokenizer_json
from zerokara.huggingface.tokenizer_proof import MAX_SHOWN, Proof, difference, load
from zerokara.tokenizer.encoder import Encoder

_ANY_LENGTH = 1 << 30
"""Context length of a tokenizer that is not a model's yet; beyond it there are warnings only."""


def prove(hf_folder: Path, conversations: Sequence[dict[str, Any]]) -> Proof:
    """Compare conversations, each with its ``messages``, ``prompt_ids`` and ``answer_ids``."""
    tokenizer, failures = load(hf_folder), list[str]()
    # Not verbose: a conversation longer than the context is no fault here.
    asked: dict[str, Any] = {"return_dict": False, "tokenizer_kwargs": {"verbose": False}}
    for each in conversations:
        messages, trained = each["messages"], each["prompt_ids"] + each["answer_ids"]
        whole = tokenizer.apply_chat_template(messages, **asked)[: len(trained)]
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **asked)
        for ours, theirs in ((trained, whole), (each["prompt_ids"], prompt)):
            if ours != theirs:
                failures.append(difference("ids", str(messages), ours, theirs))
                break
    facts = {"compared": len(conversations), "failures": len(failures)}
    differing = f"chat template: {len(failures):,} of {len(conversations):,} conversations differ; the first: "
    return Proof(facts, [differing + failures[0]] if failures else [], failures[:MAX_SHOWN])


def tokenizer_of_exports(encoder: Encoder, is_encoder_decoder: bool) -> Any:
    """Return the tokenizer of every export of a model with this encoder, as `AutoTokenizer` loads it.

    Raises: UserError when the encoder is of a kind that cannot be exported.
    """
    with TemporaryDirectory() as folder:
        tokenizer_json.write(encoder, Path(folder), _ANY_LENGTH, is_encoder_decoder)
        return load(Path(folder))
