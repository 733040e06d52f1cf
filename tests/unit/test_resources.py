"""Memory and cores that this process may use: the machine's, within its control groups and its own limit."""

import errno
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import time
from collections import namedtuple
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest

from zerokara.base import resources

GB = 10**9
SERVER = r"""
import re
from multiprocessing import forkserver
from pathlib import Path
from zerokara.base.resources import start_fork_server
start_fork_server(["json"])
status = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read_text()
print(int(re.search(r"SigIgn:\s*(\w+)", status)[1], 16) >> 1 & 1)
"""
Machine = namedtuple("Machine", "total available")
Process = namedtuple("Process", "vms")


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine of 64 GB with 50 GB free, and the innermost of two control groups, without a limit."""
    inner = tmp_path / "job"
    inner.mkdir()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Machine(64 * GB, 50 * GB))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(resources, "_CGROUPS", tmp_path)
    monkeypatch.setattr(resources, "control_groups", lambda: iter([inner, tmp_path]))
    return inner


def write(folder: Path, **files: object) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n", encoding="utf-8")


def test_the_tightest_control_group_counts(group: Path) -> None:
    assert (resources.available_memory(), resources.total_memory()) == (50 * GB, 64 * GB)
    write(group.parent, memory__max="max", memory__current=0)
    write(group, memory__max=16 * GB, memory__current=15 * GB)
    assert (resources.available_memory(), resources.total_memory()) == (GB, 16 * GB)
    write(group.parent, memory__max=8 * GB, memory__current=8 * GB)
    assert (resources.available_memory(), resources.total_memory()) == (0, 8 * GB)


def test_file_cache_of_a_control_group_is_available(group: Path) -> None:
    stat = f"anon {3 * GB}\nfile {12 * GB}\ninactive_anon 5\ninactive_file {10 * GB}"
    write(group, memory__max=16 * GB, memory__current=15 * GB, memory__stat=stat)
    assert resources.available_memory() == 11 * GB


def test_a_control_group_of_version_1_counts(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(group.parent / "memory", memory__limit_in_bytes=4 * GB, memory__usage_in_bytes=GB)
    assert (resources.available_memory(), resources.total_memory()) == (3 * GB, 4 * GB)
    monkeypatch.undo()  # this machine
    assert 10**6 < resources.available_memory() <= resources.total_memory()


def test_the_limit_of_a_process_holds_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * GB, 8 * GB))
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: Process(2 * GB))
    assert (resources.available_memory(), resources.total_memory()) == (6 * GB, 8 * GB)
    assert (resources.available_memory(2), resources.total_memory(2)) == (12 * GB, 16 * GB)
    assert (resources.available_memory(99), resources.total_memory(99)) == (50 * GB, 64 * GB)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("350000 100000", 3), ("50000 100000", 1), ("6400000 100000", 8)],
)
def test_cores_are_those_of_the_group(monkeypatch: pytest.MonkeyPatch, group: Path, quota: str, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    write(group, cpu__max=quota)
    assert resources.available_cores() == expected


def test_the_fork_server_leaves_ctrl_c_to_the_step() -> None:
    """Else it would end with a traceback while it imports."""
    done = subprocess.run([sys.executable, "-c", SERVER], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout == "1\n"


def test_a_folder_for_temporary_files_with_too_long_a_name_is_told(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SERVER], capture_output=True, encoding="utf-8", env=os.environ | {"TMPDIR": str(folder)}
    )
    assert done.returncode and "set another: TMPDIR=/tmp" in done.stderr


def test_a_pool_ends_though_a_worker_died_while_another_was_started() -> None:
    """Left to itself it would wait for ever in one of ten rounds."""
    context = multiprocessing.get_context("forkserver")
    for number in range(20):
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # one that was sent closed pipes is dying
        pool = ProcessPoolExecutor(2, context)

        def kill(delay: float = 0.0004 * (number % 10)) -> None:
            while not (workers := multiprocessing.active_children()):
                time.sleep(0.0005)
            time.sleep(delay)
            workers[0].kill()

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        with pytest.raises(BrokenProcessPool), resources.ended(pool):
            for future in [pool.submit(time.sleep, 5) for _ in range(2)]:
                future.result()
        killer.join()
        assert not multiprocessing.active_children()
    with pytest.raises(BrokenProcessPool), resources.ended(ProcessPoolExecutor(1, context)):
        raise OSError(errno.EBADF, "Bad file descriptor")  # in one of a thousand rounds
    with pytest.raises(FileNotFoundError), resources.ended(ProcessPoolExecutor(1, context)):
        raise FileNotFoundError(errno.ENOENT, "No such file", "a")
