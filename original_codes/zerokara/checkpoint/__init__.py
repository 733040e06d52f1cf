"""Checkpoints: folders ``global_stepN`` that appear whole, are checked by hash, and hold all by parameter name."""

from zerokara.checkpoint.folders import all_steps, check, folder_of, newest_complete, prune, sweep
from zerokara.checkpoint.state import TrainingState, read_moments, read_state, read_weights, save

__all__ = [
    "TrainingState",
    "all_steps",
    "check",
    "folder_of",
    "newest_complete",
    "prune",
    "read_moments",
    "read_state",
    "read_weights",
    "save",
    "sweep",
]
