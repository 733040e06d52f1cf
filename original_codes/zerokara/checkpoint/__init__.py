"""Checkpoints: folders ``global_stepN`` that appear whole, are checked by hash, and hold all by parameter name."""

from zerokara.checkpoint.folders import all_steps, check, folder_of, newest_complete, sweep
from zerokara.checkpoint.retention import Retention, mark, prune
from zerokara.checkpoint.state import TrainingState, bytes_needed, read_moments, read_state, read_weights, save

__all__ = [
    "Retention",
    "TrainingState",
    "all_steps",
    "bytes_needed",
    "check",
    "folder_of",
    "mark",
    "newest_complete",
    "prune",
    "read_moments",
    "read_state",
    "read_weights",
    "save",
    "sweep",
]
