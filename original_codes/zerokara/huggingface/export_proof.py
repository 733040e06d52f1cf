"""The proofs of an exported folder: its tokenizer gives the ids of training, its model computes the trained logits, and
its chat template, where it has one, gives the ids of training too.

In: the folder, the checkpoint it was made from, and real text. Out: an `ExportProof`, which lists every fault and holds
the facts for the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from zerokara.huggingface import continuations, logit_proof, windows
from zerokara.huggingface.chat_proof import ChatProof
from zerokara.huggingface.checkpoint_source import CheckpointSource
from zerokara.huggingface.continuations import Continuation
from zerokara.huggingface.logit_proof import LogitProof
from zerokara.huggingface.tokenizer_proof import TokenizerProof
from zerokara.samples.objective import Prompt, objective
from zerokara.tokenizer.encoder import Encoder

_CORPUS_PROMPTS, _CORPUS_PROMPT_TOKENS = 2, 8
"""Besides the user's prompts, the first tokens of this many documents are continued greedily."""


@dataclass(frozen=True)
class ExportProof:
    """The proofs, and the continuations of the user's prompts."""

    logits: LogitProof
    token_ids: TokenizerProof
    continuations: list[Continuation]
    chat: ChatProof | None = None
    """None for a model without a chat template."""

    @property
    def faults(self) -> list[str]:
        """Everything that speaks against the export; empty when all proofs hold."""
        token_ids = [] if self.token_ids.ok else [f"token ids: {self.token_ids}"]
        chat = [] if self.chat is None or self.chat.ok else [f"chat template: {self.chat}"]
        return [*self.logits.faults, *token_ids, *chat]

    def as_json(self, examples: bool = False) -> dict[str, Any]:
        """Facts for the manifest; `examples` adds differing lines of the corpus, which are not for everyone."""
        ids = self.token_ids
        names = ("lines", "whole_texts", "hard_texts", "equal", "ties")
        counts = {"holds": ids.ok, **{name: getattr(ids, name) for name in names}, "failures": ids.num_failures}
        if examples:
            counts["examples"] = [str(difference) for difference in (*ids.failures, *ids.tie_examples)]
        chat = {"chat": self.chat.as_json(examples)} if self.chat else {}
        return {
            "proof": {"holds": not self.faults, "logits": self.logits.as_json(), "token_ids": counts, **chat},
            "samples": [asdict(each) for each in self.continuations],
        }


def prove_logits(
    folder: Path,
    source: CheckpointSource,
    weights: Mapping[str, Tensor],
    dtype: str,
    encoder: Encoder,
    documents: Iterable[str],
    prompts: Sequence[str],
) -> tuple[LogitProof, list[Continuation]]:
    """Compare the logits of the exported model with the trained one's; also returns the continuations of `prompts`.

    Raises:
        RunError: there is no text to compare on.
    """
    shape = source.shape
    # Documents as in training: each starts after the end of another.
    encoded = ([encoder.eos_id, *encoder.encode(document).tolist()] for document in documents)
    config = source.config
    made = objective(config, encoder, config.seed, config.intra_document_masking)
    is_encoder_decoder = shape.traits.is_encoder_decoder
    texts = windows.of_samples(encoded, shape, made) if is_encoder_decoder else windows.within_budget(encoded, shape)
    new_tokens = continuations.num_new_tokens(shape)
    head = 1 if is_encoder_decoder else min(_CORPUS_PROMPT_TOKENS, max(1, shape.seq_len - new_tokens))
    encoder_inputs = texts.encoder_input_ids or [[] for _ in texts.tokens]
    all_prompts = [
        *(made.prompt(encoder, prompt, new_tokens) for prompt in prompts),
        *(Prompt(encoder_inputs[i], tokens[:head]) for i, tokens in enumerate(texts.tokens[:_CORPUS_PROMPTS])),
    ]
    proof, generated = logit_proof.prove(folder, weights, shape, dtype, texts, all_prompts, num_sampled=len(prompts))
    return proof, generated.decoded(encoder, prompts)
