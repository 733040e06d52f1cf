"""R10, R11, R13 in real processes: what is recorded while a run goes on, is cut short, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_resume import two_sources  # noqa: F401  # a fixture
from watched_runs import WATCHED, shown_by_tensorboard
