"""Starts the training processes of `run_sessions`: ``launch_sessions.py PROCESSES FILE``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from programs import launch

sys.exit(launch("run_sessions", sys.argv[2:], int(sys.argv[1])))
