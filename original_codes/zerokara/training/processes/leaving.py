"""How a training process ends."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process with an exit code, without taking the interpreter apart.

    gloo's threads live as long as their process groups, which torch, DeepSpeed and Megatron keep in global variables.
    One that lets go of its last tensor while the interpreter is being taken apart is ended in the middle of C++ that
    must not throw: ``terminate called without an active exception``, exit code -6, after everything was saved (once in
    some hundred ends on a busy machine). So this does what a forked process of `multiprocessing` does at its end.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
