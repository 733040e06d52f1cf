"""Checkpoints: folders ``global_stepN`` that appear whole, are checked by hash, and hold tensors by parameter name.

`checkpoint.store`, which writes them, is imported by itself: it loads torch.
"""
# ruff: noqa: F401  # the names that other rooms use

from zerokara.checkpoint.folders import (
    VALID_FACT,
    all_steps,
    best,
    broken_names,
    check,
    check_sizes,
    complete,
    folder_of,
    is_much_worse,
    newest_complete,
    newest_to_resume,
    step_of,
    write_markers,
)
from zerokara.checkpoint.state import STATE_NAME, TrainingState, parse_state, read_moments, read_state, read_weights
