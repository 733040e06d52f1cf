"""What stock transformers compute with an exported folder, read back from disk: the exported side of the proof.

The weights stay in the precision and in the files that they were saved in; the computing is in fp32 (`in_fp32`).

Shape suffixes: S sequence, V real vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokara.huggingface import families
from zerokara.huggingface.continuations import Continued, continue_all
from zerokara.huggingface.in_fp32 import InFp32
from zerokara.huggingface.mapped_pages import MappedPages
from zerokara.huggingface.windows import Windows
from zerokara.model.shapes import ModelShape
from zerokara.samples.objective import Prompt


@dataclass(frozen=True)
class Exported:
    """What the exported model is and computes; logits per window [S, V], fp32, on the CPU."""

    complaints: list[str]
    """Of loading: keys that are missing, left over, or of another shape."""
    tied: bool
    """Whether one matrix reads and predicts, in the loaded model."""
    config_tied: bool
    vocab_size: int
    logits: list[Tensor]
    continued: Continued
    bf16_logits: list[Tensor]
    """Of the first windows, computed in bf16 from beginning to end."""


def compute(
    folder: Path,
    dtype: torch.dtype,
    shape: ModelShape,
    windows: Windows,
    bf16_windows: Windows,
    prompts: Sequence[Prompt],
    num_sampled: int,
) -> Exported:
    """Load the folder, whose weights are in `dtype`, and compute; the model is gone from memory afterwards."""
    model, complaints = load(folder, dtype, shape)
    MappedPages(model, folder)
    with InFp32():
        logits = windows.through(partial(_logits, model), "proof, exported model")
        continued = continue_all(model, prompts, num_sampled, shape)
    model.to(torch.bfloat16)
    bf16 = bf16_windows.through(partial(_logits, model), "proof, exported model in bf16")
    return Exported(
        complaints=complaints,
        tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        config_tied=families.FAMILIES[shape.architecture].says_tied(model.config),
        vocab_size=model.config.vocab_size,
        logits=logits,
        continued=continued,
        bf16_logits=bf16,
    )


def load(folder: Path, dtype: torch.dtype, shape: ModelShape) -> tuple[Any, list[str]]:
    """Load an exported folder with stock transformers; also gives what loading complained about."""
    import transformers
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    auto_class = getattr(transformers, families.FAMILIES[shape.architecture].auto_class)
    model, report = auto_class.from_pretrained(
        folder, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
    )
    complaints = [f"loading reports {name}: {sorted(map(str, found))}" for name, found in report.items() if found]
    return model.to(device()).eval(), complaints


def device() -> torch.device:
    """Where the proof computes: a GPU, where there is one, also for megatron-core, which asks for it."""
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
        read, readable = encoder_input_ids_BR.to(model.device), encoder_attention_mask_BR.to(model.device)
        return model(input_ids=read, attention_mask=readable, decoder_input_ids=tokens).logits.float().cpu()
