"""A disk without room: a save that is refused, or fails in the middle, ends no run; everything catches up later."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.running import COMMON, Fault, Forge, assert_equal, make_forge, wait_for, whole_checkpoints
from tiny import Trained

DISK_BYTES = 12 * 2**20
SETTINGS: dict[str, object] = {**COMMON, "tensorboard": "true"}


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the small disk is mounted, for the forge alone."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def small_forge(tiny_data: dict[str, str], disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """Training processes that see a small disk of their own: a tmpfs, which whoever may make a namespace may mount."""
    mount = f'mount -t tmpfs -o size={DISK_BYTES} none {disk} && exec "$@"'
    prefix = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh")
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"this machine gives its users no mounts of their own: {tried.stderr.strip()}")
    yield from make_forge(tiny_data, tmp_path_factory.mktemp("small"), prefix)


class Disk:
    """The small disk, seen from here."""

    def __init__(self, forge: Forge, disk: Path, name: str):
        self.run_dir = disk / name
        """As the training sees it."""
        self.seen = Path(f"{forge.root}{self.run_dir}")
        """As we see it."""
        self._filler = self.seen.parent / "filler"

    def fill(self, left: int = 0) -> None:
        """Leave so many bytes free."""
        block = b"x" * 4096
        with open(self._filler, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(block)
            except OSError:
                pass
            file.truncate(max(0, file.tell() - left))

    def clear(self) -> None:
        """Give the room back."""
        self._filler.unlink(missing_ok=True)


@pytest.fixture
def small(small_forge: Forge, disk: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    made = Disk(small_forge, disk, request.node.name)
    yield made
    made.clear()
    subprocess.run(["rm", "-rf", str(made.seen)], check=True)


def test_no_room_before_a_save(small_forge: Forge, small: Disk, unbroken: Trained) -> None:
    with Fault("no room for a save"):
        small.fill(left=2**20)
        small_forge.start(small.run_dir, {"retry_seconds": 0.1, "slow_steps": 0.05}, **SETTINGS)
        wait_for(lambda: "step 6/" in small_forge.words)
        assert "step 2  NOT saved: " in small_forge.words and "are needed" in small_forge.words
        assert "are free. Delete something on this disk" in small_forge.words
        assert "step 2  was never saved; step 4 takes its place" in small_forge.words
        assert not whole_checkpoints(small.seen)
        small.clear()
        assert small_forge.wait() == 0, small_forge.words
        assert_equal(small.seen, unbroken)


def test_full_in_the_middle_of_a_save(small_forge: Forge, small: Disk, unbroken: Trained) -> None:
    """The disk is full before the optimizer's file is written, and stays so for some steps: nothing can be recorded."""
    with Fault("ENOSPC in the middle of a save"):
        filler = small.run_dir.parent / "filler"
        fault = {"retry_seconds": 0.1, "slow_steps": 0.05, "fill_in_save": [3, str(filler)]}
        small_forge.start(small.run_dir, fault, **SETTINGS)
        wait_for(lambda: "step 10/" in small_forge.words)
        assert "step 6  NOT saved: " in small_forge.words
        assert "optimizer.safetensors" in small_forge.words and "No space left on device" in small_forge.words
        assert not list(small.seen.glob("global_step*.partial/optimizer.safetensors"))
        assert whole_checkpoints(small.seen) == [2, 4]
        small.clear()
        assert small_forge.wait() == 0, small_forge.words
        assert "after all; training waited" in small_forge.words
        assert_equal(small.seen, unbroken)


def test_full_at_the_very_end(small_forge: Forge, small: Disk, unbroken: Trained) -> None:
    with Fault("a full disk at the end of the run"):
        filler = small.run_dir.parent / "filler"
        fault = {"retry_seconds": 0.1, "patience_seconds": 1.0, "word_seconds": 0.3, "fill_in_save": [22, str(filler)]}
        assert small_forge.run(small.run_dir, fault, **SETTINGS) == 1, small_forge.words
        assert "failed: the checkpoint of step 44 could not be saved" in small_forge.words
        assert "not yet saved, trying for" in small_forge.words
        assert f"The newest checkpoint that stands is {small.run_dir}/global_step42" in small_forge.words
        assert whole_checkpoints(small.seen)[-1] == 42
        small.clear()
        assert small_forge.run(small.run_dir, **SETTINGS) == 0, small_forge.words
        assert_equal(small.seen, unbroken)
