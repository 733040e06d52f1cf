"""An encoder that fails as it is told to, for worker processes: they can import this module, unlike a test's."""

import errno
import os
import signal
import time
from typing import Any

import numpy as np


class FailingEncoder:
    """What its `encode_joined` does is the first word of `action`."""

    vocab_size, eos_id, start_id, unk_id = 100, 2, -1, 0

    def __init__(self, *action: Any):
        self.action = action
        self._calls = 0

    def encode_joined(self, texts: Any) -> Any:
        what = self.action[0]
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "full":
            raise OSError(errno.ENOSPC, "No space left on device", "shard")
        if what in ("slow", "stuck"):
            time.sleep(0.1 if what == "slow" or self._calls < 8 else 1000)  # a task has six batches
            self._calls += 1
            return np.tile(np.array([1, 2], dtype=np.int32), len(texts)), [1] * len(texts)
        raise ZeroDivisionError("a fault of ours")
