"""Checkpoints: folders ``global_stepN`` that appear whole, are checked by hash, and hold tensors by parameter name.

`checkpoint.store`, which writes them, is imported by itself: it loads torch.
"""

from zerokara.checkpoint.folders import all_steps, check, folder_of, newest_complete, step_of
from zerokara.checkpoint.recovery import broken_names, newest_to_resume, remove_leftovers, set_aside
from zerokara.checkpoint.retention import Retention, best, prune, write_markers
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
    "prune",
    "read_moments",
    "read_state",
    "read_weights",
    "remove_leftovers",
    "set_aside",
    "step_of",
    "write_markers",
]
