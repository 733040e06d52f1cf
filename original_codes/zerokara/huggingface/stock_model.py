"""A Hugging Face folder → the model that stock transformers load from it.

Weights come from safetensors on this machine only; no code of the folder is run.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from zerokara.huggingface.families import Family


def load(folder: Path, dtype: torch.dtype, family: Family) -> tuple[Any, list[str]]:
    """Return the model on the CPU, and what the loading report complains about: missing, unexpected, other shapes."""
    import transformers  # half a second to import, and each training process imports this module

    with quiet(progress_bar=sys.stderr.isatty()):
        model, report = getattr(transformers, family.auto_class).from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    return model, report_faults(report)


@contextmanager
def quiet(progress_bar: bool) -> Iterator[None]:
    """Keep transformers from warning that T5's separate output matrix is not tied, as it should be."""
    from transformers.utils import logging

    verbosity, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not progress_bar:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bar:
            logging.enable_progress_bar()


def report_faults(report: Mapping[str, Collection[object]]) -> list[str]:
    """What transformers' loading report complains about."""
    return [f"{name}: {sorted(map(str, keys))}" for name, keys in report.items() if keys]
