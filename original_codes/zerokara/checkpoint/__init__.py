"""Checkpoints: folders ``global_stepN`` that appear whole, are checked by hash, and hold tensors by parameter name.

`checkpoint.store`, which writes them, is imported by itself: it loads torch.
"""

from zerokara.checkpoint.folders import (
    Retention,
    all_steps,
    best,
    broken_names,
    check,
    folder_of,
    newest_complete,
    newest_to_resume,
    step_of,
    write_markers,
)
from zerokara.checkpoint.state import STATE_NAME, TrainingState, parse_state, read_moments, read_state, read_weights

__all__ = [
    "STATE_NAME",
    "Retention",
    "TrainingState",
    "all_steps",
    "best",
    "broken_names",
    "check",
    "folder_of",
    "newest_complete",
    "newest_to_resume",
    "parse_state",
    "read_moments",
    "read_state",
    "read_weights",
    "step_of",
    "write_markers",
]
