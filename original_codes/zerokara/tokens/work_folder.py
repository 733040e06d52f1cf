"""The folder in which step 2 works: one run at a time, and what a run that was ended had finished.

``plan.json`` says what the shards in it were made from: the files (name, size, time of change), the tokenizer, the
settings that change a shard, the size of a task. A run with the same plan takes the finished shards over; with
another it begins anew. A shard counts as finished when its ``<name>.json`` is there, which is written last, and its
files have the sizes and the checksums that stand in it: nothing is flushed to the disk on the way, so a power cut may
have lost any of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from zerokara import file_lock
from zerokara.corpus.inputs import InputFile
from zerokara.durable import PARTIAL_SUFFIX, made_folder, write_json
from zerokara.errors import Fault, UserError
from zerokara.progress import Progress
from zerokara.tokens.layout import TokenPaths, bin_path
from zerokara.tokens.shards import ShardResult, is_whole, result_path

FORMAT = 3
"""Raised when the same plan would give other shards, or results of another form."""
PLAN_NAME = "plan.json"


@dataclass(frozen=True)
class ShardPlan:
    """What the shards are made from; all but the last two must be equal for a run to go on with another's shards."""

    files: list[list[Any]]
    """[name, bytes, modified_ns, source] of each."""
    tokenizer_sha256: str
    text_field: str
    txt_document: str
    task_bytes: int
    """The first run's stands, however many workers a later one has."""
    encoder: str = ""
    """The name of the encoder at work; once SentencePiece has had to take over, it stays."""
    format: int = FORMAT

    def continues(self, earlier: ShardPlan) -> bool:
        """Whether shards made by `earlier` are this one's too."""
        free = {"task_bytes": 0, "encoder": ""}
        return asdict(self) | free == asdict(earlier) | free


def files_as_listed(files: Sequence[InputFile]) -> list[list[Any]]:
    """The files as a plan holds them."""
    return [[file.name, file.bytes, file.modified_ns, file.source] for file in files]


@contextmanager
def claimed(paths: TokenPaths) -> Iterator[Path]:
    """The work folder, for this run alone.

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
        finally:  # only with the lock: what lies there may be another run's
            if folder.is_dir():
                _remove_unfinished(folder)
                # Kept where something is finished, or where it tells alone that the token files there are of step 2.
                if not any(folder.glob("*-*.json")) and not _lack_manifest(paths):
                    shutil.rmtree(folder, ignore_errors=True)


def _lack_manifest(paths: TokenPaths) -> bool:
    """Whether token files lie there of a run that was killed before it wrote the manifest."""
    return not paths.manifest.exists() and any(bin_path(prefix).exists() for prefix in (paths.train, paths.valid))


def discard(paths: TokenPaths) -> None:
    """Remove the folder, unless a run is at work in it."""
    if paths.work_folder.is_dir():
        with suppress(UserError), claimed(paths) as folder:
            shutil.rmtree(folder, ignore_errors=True)


def settle(folder: Path, wanted: ShardPlan, last_merged: str = "") -> tuple[ShardPlan, dict[str, ShardResult]]:
    """The plan to follow, and the finished shards by name: an earlier run's where it continues, else none.

    Shards up to `last_merged` are in the merged files already, and their own are gone.
    """
    earlier = _read_plan(folder)
    if earlier is None or not wanted.continues(earlier):
        restart(folder, wanted)
        return wanted, {}
    _remove_unfinished(folder)
    finished = {}
    found = sorted(folder.glob("*-*.json"))
    with Progress("checking finished shards", len(found), "shard") as progress:
        for path in found:
            result = _read_result(path)
            if result is not None and (result.name <= last_merged or is_whole(folder, result)):
                finished[result.name] = result
            else:
                path.unlink()
            progress.advance()
    return earlier, finished


def restart(folder: Path, plan: ShardPlan) -> None:
    """Empty the folder and write the plan."""
    for left_over in folder.iterdir():
        left_over.unlink() if left_over.is_file() else shutil.rmtree(left_over)
    write_json(folder / PLAN_NAME, asdict(plan))


def kept_shards(folder: Path) -> tuple[int, int]:
    """How many finished shards lie there, and their bytes."""
    if not folder.is_dir():
        return 0, 0
    number = sum(1 for _ in folder.glob("*-*.json"))
    return number, sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _remove_unfinished(folder: Path) -> None:
    # A worker that a killed run left behind may still be writing; its files are its own, and it ends when it is done.
    for path in folder.glob(f"*{PARTIAL_SUFFIX}"):
        path.unlink(missing_ok=True)


def _read_plan(folder: Path) -> ShardPlan | None:
    try:
        return ShardPlan(**orjson.loads((folder / PLAN_NAME).read_bytes()))
    except (FileNotFoundError, orjson.JSONDecodeError, TypeError):  # what cannot be read just now ends the step
        return None


def _read_result(path: Path) -> ShardResult | None:
    try:
        result = ShardResult.from_json(orjson.loads(path.read_bytes()))
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return None
    return result if path == result_path(path.parent, result.name) else None
