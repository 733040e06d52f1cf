"""The folder in which step 2 works: one run at a time, with the shards that an interrupted run had finished.

``plan.json`` says what the shards in it were made from: the files (by content, see `corpus_content`), the tokenizer,
the settings that change a shard, the size of a task. A run with the same plan takes over the finished shards; one with
another plan starts over. A shard counts as finished when its ``<name>.json`` is there, which is written last, and its
files have the sizes and the checksums recorded in it: nothing is synced on the way on one machine, so a power cut may
lose any of them.

Several machines may work in the folder for one step (`tokens.cluster`). Names of unfinished files tell their writer,
and one machine removes those alone whose process has ended there; the step, which alone holds the lock, removes the
others when nobody is at work any more.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from zerokara import file_lock
from zerokara.corpus.find import InputFile
from zerokara.durable import PARTIAL_SUFFIX, made_folder, write_json
from zerokara.errors import Fault, UserError
from zerokara.progress import Progress, bytes_text
from zerokara.tokens import corpus_content
from zerokara.tokens.corpus_content import FileRecord
from zerokara.tokens.layout import TokenPaths, bin_path
from zerokara.tokens.shards import ENDINGS, ShardResult, is_left_here, shard_path

FORMAT = 6
"""Raised when the same plan would give other shards, or results of another form."""
PLAN_NAME = "plan.json"
AT_WORK_NAME = "cluster.json"
"""There as long as a cluster's scheduler may have processes at work in the folder (`tokens.cluster`)."""
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class ShardPlan:
    """What the shards are made from; to resume from them, all but `task_bytes` and `encoder` must be equal."""

    files: Sequence[FileRecord]
    tokenizer_sha256: str
    text_field: str
    txt_document: str
    task_bytes: int
    """The first run's size stays, however many workers a later run has."""
    encoder: str = ""
    """Name of the encoder; once SentencePiece has had to take over, it stays."""
    format: int = FORMAT

    def continues(self, earlier: ShardPlan) -> bool:
        """Whether shards made by `earlier` from the same files serve this plan too."""
        return replace(self, files=earlier.files, task_bytes=earlier.task_bytes, encoder=earlier.encoder) == earlier


@contextmanager
def claimed(paths: TokenPaths) -> Iterator[Path]:
    """Claim the work folder for this run alone.

    Raises:
        UserError: another run of step 2 is at work there.
    """
    folder = paths.work_folder
    with made_folder(folder.parent), file_lock.held(paths.lock) as is_ours:
        if not is_ours:
            rule = f"{file_lock.read_holder(paths.lock) or 'another run of step 2'} is writing here"
            remedy = "wait for it, or choose another output_prefix"
            raise UserError(Fault(where=str(folder), rule=rule, remedy=remedy))
        folder.mkdir(exist_ok=True)
        try:
            yield folder
        finally:  # only under the lock: otherwise the files may be another run's
            if folder.is_dir():
                remove_unfinished(folder)
                # Kept if a shard is finished, or if nothing else shows that the token files beside it are step 2's.
                if not any(folder.glob("*-*.json")) and not _lacks_manifest(paths):
                    shutil.rmtree(folder, ignore_errors=True)


def _lacks_manifest(paths: TokenPaths) -> bool:
    """Whether there are token files of a run that was killed before it wrote the manifest."""
    return not paths.manifest.exists() and any(bin_path(prefix).exists() for prefix in (paths.train, paths.valid))


def discard(paths: TokenPaths) -> None:
    """Remove the folder, unless another run is using it."""
    if paths.work_folder.is_dir():
        with suppress(UserError), claimed(paths) as folder:
            shutil.rmtree(folder, ignore_errors=True)


def settle(
    folder: Path,
    wanted: ShardPlan,
    files: Sequence[InputFile],
    merged: Collection[str] = (),
    before_restart: Callable[[], None] = lambda: None,
) -> tuple[ShardPlan, dict[str, ShardResult]]:
    """Return the plan to follow and the finished shards by name: those of an earlier run if this one continues it.

    Shards that are `merged` are in the merged files already; their own files are deleted. `before_restart` is called
    where the folder is about to be emptied.
    """
    earlier = _read_plan(folder)
    known = corpus_content.recorded(folder)
    if earlier is None or not wanted.continues(earlier) or not corpus_content.is_same(earlier.files, files, known):
        before_restart()
        restart(folder, wanted)
        return wanted, {}
    if list(earlier.files) != list(wanted.files):  # the same content: the next time without reading it
        earlier = replace(earlier, files=wanted.files)
        write_json(folder / PLAN_NAME, earlier)
    remove_unfinished(folder)
    finished = {}
    records = sorted(folder.glob("*-*.json"))
    with Progress("checking finished shards", len(records), "shard") as progress:
        for path in records:
            result = read_result(path)
            if result is not None and (result.name in merged or _is_undamaged(folder, result)):
                finished[result.name] = result
            else:
                path.unlink()
            progress.advance()
    return earlier, finished


def restart(folder: Path, plan: ShardPlan) -> None:
    """Empty the folder and write the plan."""
    for left_over in folder.iterdir():
        if left_over.is_dir():
            shutil.rmtree(left_over)
        else:
            left_over.unlink(missing_ok=True)
    write_json(folder / PLAN_NAME, plan)


def kept_text(folder: Path) -> str:
    """What a run that failed leaves for the next one, for its message."""
    if not (number := sum(1 for _ in folder.glob("*-*.json"))):
        return "nothing was written"
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return f"{number:,} finished shards ({bytes_text(size)}) are kept in {folder}"


def remove_unfinished(folder: Path) -> None:
    """Remove what was not finished; where a cluster may be at work, only what ended processes of this machine left."""
    others_work = (folder / AT_WORK_NAME).exists()
    for path in folder.glob(f"*{PARTIAL_SUFFIX}"):
        if not others_work or is_left_here(path):
            path.unlink(missing_ok=True)


def _read_plan(folder: Path) -> ShardPlan | None:
    try:
        plan = ShardPlan(**orjson.loads((folder / PLAN_NAME).read_bytes()))
        files: Any = plan.files
        return replace(plan, files=[FileRecord(**record) for record in files])
    except (FileNotFoundError, orjson.JSONDecodeError, TypeError):  # an OSError ends the step: the plan may be intact
        return None


def read_result(path: Path) -> ShardResult | None:
    """The result of a shard; None if its file is damaged."""
    with suppress(ValueError, TypeError, KeyError):
        result = ShardResult.read(path)
        return result if result.name == path.stem else None
    return None


def _is_undamaged(folder: Path, result: ShardResult) -> bool:
    """Whether the files of a shard have the sizes and checksums of its result."""
    for ending, (size, checksum) in result.files.items():
        path = shard_path(folder, result.name, ending)
        if not path.is_file() or path.stat().st_size != size:
            return False
        found = 0
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                found = zlib.crc32(chunk, found)
        if found != checksum:
            return False
    return set(result.files) == set(ENDINGS)
