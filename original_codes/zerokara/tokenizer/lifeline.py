"""A process that this program starts for its work ends with it, however it ends (`kill -9` as well).

Linux sends a process a signal when the one that started it dies (prctl(2), `PR_SET_PDEATHSIG`). Elsewhere nothing of
the kind exists, and the process ends when its work does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h."""


def end_with_parent(parent_pid: int) -> None:
    """Let this process be killed when its parent, which has that number, is gone; asked first thing in a process."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # It died before this was asked.
        os._exit(1)
