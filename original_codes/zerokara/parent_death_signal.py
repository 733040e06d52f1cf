"""Child processes that end with their parent, however it ends (`kill -9` as well).

Linux sends a process a signal when its parent dies (prctl(2), `PR_SET_PDEATHSIG`). Elsewhere nothing of the kind
exists, and the child ends when its work does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h."""


def end_with_parent(parent_pid: int, number: int = signal.SIGKILL) -> None:
    """Ask for signal `number` when the parent, whose process id is `parent_pid`, dies; call it first in the child."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:  # It died before the request.
        os._exit(1)
