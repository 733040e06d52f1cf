"""The exported side of the proof: what stock transformers compute with an exported folder, read back from disk.

The weights stay in the precision and in the files in which they were saved; the computation is in fp32
(`fp32_inference`).

Shape suffixes: B batch, S sequence, R encoder sequence, V real vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokara.huggingface import continuations, families, stock_model
from zerokara.huggingface.continuations import GeneratedTokens
from zerokara.huggingface.fp32_inference import Fp32Inference
from zerokara.huggingface.windows import Windows
from zerokara.model.shapes import ModelShape
from zerokara.samples.objective import Prompt


@dataclass(frozen=True)
class ReferenceOutput:
    """What the exported model is and computes; logits of each window [S, V], fp32, on the CPU."""

    faults: list[str]
    """Keys that loading reports as missing, unexpected, or of another shape, and what differs from our shape."""
    is_tied: bool
    """Whether embedding and output matrix are one tensor in the loaded model."""
    logits: list[Tensor]
    generated: GeneratedTokens
    bf16_logits: list[Tensor]
    """Of the first windows, computed in bf16 throughout."""


def compute(
    folder: Path,
    dtype: torch.dtype,
    shape: ModelShape,
    windows: Windows,
    bf16_windows: Windows,
    prompts: Sequence[Prompt],
    num_sampled: int,
) -> ReferenceOutput:
    """Load the folder, whose weights are in `dtype`, and compute; the model is gone from memory afterwards."""
    family = families.FAMILIES[shape.architecture]
    model, loading_faults = stock_model.load(folder, dtype, family)
    model = model.to(device()).eval()
    with Fp32Inference():
        logits = windows.through(partial(_logits, model), "proof, exported model")
        generated = continuations.generate(model, prompts, num_sampled, shape)
    model.to(torch.bfloat16)
    bf16_logits = bf16_windows.through(partial(_logits, model), "proof, exported model in bf16")
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    faults = [f"loading reports {fault}" for fault in loading_faults]
    for name, value, expected in (
        ("tied output matrix", is_tied, shape.tie_word_embeddings),
        ("tie_word_embeddings in config.json", family.config_is_tied(model.config), shape.tie_word_embeddings),
        ("vocabulary", model.config.vocab_size, shape.vocab_size),
    ):
        if value != expected:
            faults.append(f"{name} is {value}, must be {expected}")
    return ReferenceOutput(faults, is_tied, logits, generated, bf16_logits)


def device() -> torch.device:
    """Where the proof computes: on a GPU if there is one, also megatron-core, which asks for it."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _logits(
    model: Any,
    tokens_BS: Tensor,
    encoder_input_ids_BR: Tensor | None = None,
    encoder_attention_mask_BR: Tensor | None = None,
) -> Tensor:
    tokens = tokens_BS.to(model.device)
    with torch.inference_mode():
        if encoder_input_ids_BR is None or encoder_attention_mask_BR is None:
            return model(tokens).logits.float().cpu()
        encoder_inputs, mask = encoder_input_ids_BR.to(model.device), encoder_attention_mask_BR.to(model.device)
        return model(input_ids=encoder_inputs, attention_mask=mask, decoder_input_ids=tokens).logits.float().cpu()
