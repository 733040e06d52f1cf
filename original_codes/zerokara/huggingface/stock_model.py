"""A Hugging Face folder → the model that stock transformers load from it.

Weights come from safetensors on this machine only; no code of the folder is run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from zerokara.huggingface.families import Family


def load(folder: Path, dtype: torch.dtype, family: Family) -> tuple[Any, list[str]]:
    """Return the model on the CPU, and what the loading report complains about: missing, unexpected, other shapes."""
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns that T5's separate output matrix is not tied, as it should be
    try:
        model, report = getattr(transformers, family.auto_class).from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    finally:
        logging.set_verbosity(verbosity)
    return model, [f"{name}: {sorted(map(str, keys))}" for name, keys in report.items() if keys]
