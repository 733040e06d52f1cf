"""A start with checkpoints that are broken, that cannot be read at the moment, or that are too new."""

import builtins
import errno
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_checkpoints import saved

from zerokara import checkpoint
from zerokara.base import manifest
from zerokara.base.errors import RunError
from zerokara.checkpoint import folders
from zerokara.config.engine import MonitoringSettings


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "RETRY_PAUSES_SECONDS", (0.0, 0.0))


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Lets opening files whose paths hold one of `parts` fail, a number of times."""
    faults, real = SimpleNamespace(parts=(), errno=errno.ESTALE, times=10**9, failed=0), io.open

    def opening(path: Any, *arguments: Any, **named: Any) -> Any:
        if any(part in str(path) for part in faults.parts) and faults.times > 0:
            faults.times -= 1
            faults.failed += 1
            raise OSError(faults.errno, os.strerror(faults.errno), str(path))
        return real(path, *arguments, **named)

    for module in (builtins, io):
        monkeypatch.setattr(module, "open", opening)
    return faults


def left(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir())


def test_a_manifest_that_cannot_be_read_now_costs_no_checkpoint(tmp_path: Path, unreadable: SimpleNamespace) -> None:
    """The best, and the newest but one: each is kept by the rule, and nobody knows it just now."""
    for step, loss in ((10, 1.0), (20, 2.0), (30, 3.0), (40, 4.0)):
        saved(tmp_path, step, loss)
    unreadable.parts = ("global_step10/", "global_step30/")
    assert folders.prune(tmp_path, MonitoringSettings(keep_last=2)) == []
    unreadable.parts = ()
    assert folders.prune(tmp_path, MonitoringSettings(keep_last=2)) == [tmp_path / "global_step20"]


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO])
def test_transient_errors_are_retried(tmp_path: Path, unreadable: SimpleNamespace, code: int) -> None:
    newest = saved(tmp_path, 10)
    log: list[str] = []
    unreadable.parts, unreadable.errno, unreadable.times = ("weights.safetensors",), code, 2
    assert checkpoint.newest_to_resume(tmp_path, log.append) == newest
    assert unreadable.failed == 2 and len(log) == 2
    unreadable.times = 2
    assert checkpoint.newest_complete(tmp_path) == newest


def test_an_error_that_lasts_sets_it_aside_or_stops_a_reader(tmp_path: Path, unreadable: SimpleNamespace) -> None:
    older, newer = saved(tmp_path, 10), saved(tmp_path, 20)
    unreadable.parts = ("global_step20/optimizer",)
    with pytest.raises(RunError, match=r"global_step20/optimizer\.safetensors"):
        checkpoint.newest_complete(tmp_path)
    assert left(tmp_path) == ["global_step10", "global_step20"]
    log: list[str] = []
    assert checkpoint.newest_to_resume(tmp_path, log.append) == older
    assert left(tmp_path) == ["global_step10", "global_step20.broken"]
    assert any(str(newer) in line and "global_step20.broken" in line for line in log)
    # The run reaches that step again; the one that was set aside stays, and can be given its name back.
    saved(tmp_path, 20)
    unreadable.parts = ()
    checkpoint.check(tmp_path / "global_step20.broken")
    assert folders.prune(tmp_path, MonitoringSettings(keep_last=1, keep_best=False)) == [
        older
    ] and checkpoint.all_steps(tmp_path) == [20]


@pytest.mark.parametrize(("harm", "failed"), [("unreadable", 6), ("forbidden", 1), ("broken", 0)])
def test_a_run_never_starts_over(tmp_path: Path, unreadable: SimpleNamespace, harm: str, failed: int) -> None:
    for step in (10, 20):
        (saved(tmp_path, step) / "weights.safetensors").write_bytes(b"x")
    if harm != "broken":
        unreadable.parts = ("manifest.json",)
    unreadable.errno = errno.EACCES if harm == "forbidden" else errno.ESTALE
    with pytest.raises(RunError, match="global_step20"):
        checkpoint.newest_to_resume(tmp_path, lambda _: None)
    assert unreadable.failed >= failed and (harm != "forbidden" or unreadable.failed == 1), "a ban is not retried"
    assert left(tmp_path) == ["global_step10", "global_step20"]


def test_a_manifest_of_a_newer_format_is_not_broken(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    newest = saved(tmp_path, 20) / "manifest.json"
    content = json.loads(newest.read_text(encoding="utf-8"))
    newest.write_text(json.dumps({**content, "signature": "x"}), encoding="utf-8")  # a further field: no harm
    assert checkpoint.newest_to_resume(tmp_path) == newest.parent
    newest.write_text(json.dumps({**content, "format": manifest.FORMAT + 1}), encoding="utf-8")
    for find in (checkpoint.newest_to_resume, checkpoint.newest_complete):
        with pytest.raises(manifest.NewerFormatError):
            find(tmp_path)
    saved(tmp_path, 30)
    assert folders.prune(tmp_path, MonitoringSettings(keep_last=1, keep_best=False)) == [tmp_path / "global_step10"]
    assert left(tmp_path) == ["global_step20", "global_step30"]


def test_a_broken_one_of_the_same_step_is_not_replaced(tmp_path: Path) -> None:
    (saved(tmp_path, 10) / "weights.safetensors").write_bytes(b"somebody's")
    saved(tmp_path, 10)
    assert (tmp_path / "global_step10.broken" / "weights.safetensors").read_bytes() == b"somebody's"
    checkpoint.check(tmp_path / "global_step10")


def test_only_what_saves_and_deletions_left_is_removed(tmp_path: Path) -> None:
    whole = saved(tmp_path, 10)
    saved(tmp_path, 5)
    for name in ("global_step20.partial", "global_step5.deleted.partial"):
        (tmp_path / name).mkdir()
    for name in ("latest.77.partial", "download.partial", "notes.txt"):
        (tmp_path / name).touch()
    os.rename(whole, tmp_path / "global_step10.old.partial")  # a replacement that was cut short between two renames
    assert checkpoint.newest_to_resume(tmp_path) == whole
    assert left(tmp_path) == ["download.partial", "global_step10", "global_step5", "notes.txt"]
