"""A training process of step 3 that measures its memory around each save: ``measured_saves.py FOLDER PLAN``.

Writes FOLDER/RANK.json: a list of [resident before the save, the most until it was written], in bytes. The peak is the
kernel's own (VmHWM), which is set back before each save (``5`` in /proc/self/clear_refs, proc(5)).
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerokara.training import worker
from zerokara.training.saving import Saver


def resident(name: str) -> int:
    """Bytes that the kernel tells of this process under a name: VmRSS, VmHWM."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def main(arguments: Sequence[str]) -> int:
    """Train."""
    folder, plan = Path(arguments[0]), arguments[1]
    found: list[list[int]] = []
    save = Saver.save

    def measured(self: Saver, state: Any) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        before = resident("VmRSS")
        save(self, state)
        assert self._current is not None
        self._current.result()
        found.append([before, resident("VmHWM")])
        (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")

    Saver.save = measured  # type: ignore[method-assign]
    return worker.main([plan, "train"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
