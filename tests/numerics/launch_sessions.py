"""Starts the training processes of `run_sessions`: ``launch_sessions.py PROCESSES FILE``."""

import sys

from zerokara.training import spawning

sys.exit(spawning.launch("run_sessions", sys.argv[2:], int(sys.argv[1])))
