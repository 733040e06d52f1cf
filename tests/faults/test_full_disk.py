"""A full disk: a save that is refused, or fails in the middle, ends no run; later saves make up for it."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.running import COMMON, Forge, assert_equal, wait_for, whole_checkpoints
from tiny import Trained

SETTINGS: dict[str, Any] = {**COMMON, "tensorboard": "true"}


class Disk:
    """The small disk, seen from here."""

    def __init__(self, disk: Path, forge: Forge, name: str):
        self.run_dir, self.filler = disk / name, disk / "filler"
        """As the training sees them."""
        self._root = f"/proc/{forge.process.pid}/root"
        self.seen = Path(f"{self._root}{self.run_dir}")
        """The run folder as we see it."""

    def fill(self, left: int = 0) -> None:
        block = b"x" * 4096
        with open(f"{self._root}{self.filler}", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(block)
            except OSError:
                pass
            file.truncate(max(0, file.tell() - left))

    def clear(self) -> None:
        Path(f"{self._root}{self.filler}").unlink(missing_ok=True)


@pytest.fixture
def small(forge: Forge, request: pytest.FixtureRequest) -> Iterator[Disk]:
    if forge.disk is None:
        pytest.skip("this machine gives its users no mounts of their own (unshare --user --mount)")
    made = Disk(forge.disk, forge, request.node.name)
    yield made
    made.clear()
    subprocess.run(["rm", "-rf", str(made.seen)], check=True)


def test_a_full_disk_ends_no_run_before_its_end(forge: Forge, small: Disk, unbroken: Trained) -> None:
    """Full before a save, then in the middle of one and for some steps, and at the very end."""
    small.fill(left=2**20)
    fault = {
        "retry_seconds": 0.1, "patience_seconds": 1.5, "reminder_seconds": 0.2,
        "fill_in": [[14, 44], str(small.filler)],
        "hold": [{"at_step": 7, "gone": str(small.filler)}, {"at_step": 19, "event": {"saved": 18}}],
    }  # fmt: skip

    def refusals() -> list[dict[str, Any]]:
        return [event for event in forge.events if "refused" in event]

    forge.start(small.run_dir, fault, **SETTINGS)
    wait_for(lambda: 6 in forge.values("step") and 4 in forge.values("refused"))
    before = refusals()  # once: there are more by the next look
    assert {event["errno"] for event in before} == {errno.ENOSPC}
    assert before[0]["refused"] == 2 and not forge.values("saved")
    assert "step 2  checkpoint NOT saved" in forge.log and "step 2  was not saved" in forge.log
    assert not whole_checkpoints(small.seen)
    small.clear()
    wait_for(lambda: 18 in forge.values("refused"))  # nothing can be recorded meanwhile
    middle = next(event for event in refusals() if event["refused"] >= 14)
    assert middle == {"refused": 14, "errno": errno.ENOSPC, "file": "optimizer.safetensors"}
    assert not list(small.seen.glob("global_step*.partial/optimizer.safetensors"))
    assert whole_checkpoints(small.seen)[-2:] == [10, 12]
    small.clear()
    assert forge.wait() == 1, forge.log
    assert forge.values("saved")[-1] == 42 and forge.values("refused")[-1] == 44
    assert "step 44  checkpoint not saved yet" in forge.log
    assert "failed: " in forge.log and f"{small.run_dir}/global_step42" in forge.log
    assert whole_checkpoints(small.seen)[-1] == 42
    small.clear()
    assert forge.run(small.run_dir, **SETTINGS) == 0, forge.log
    assert_equal(small.seen, unbroken)
