"""The folder in which step 2 works, with the shards that are finished, and who may work there.

A run works there alone, or does one share of the work beside others, on this machine or on another that sees the disk.

``plan.json`` says what the shards are made from: the files, the tokenizer, the settings that change a shard, the size
of a task. A run with the same plan takes over the finished shards; one with another plan starts over, and a share of
the work with another plan is refused. A shard is finished when its ``<name>.json`` is there, which is written last, and
its files have the sizes and the checksums recorded in it: a run that works alone syncs nothing on the way, so a power
cut may lose any of them.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from zerokara import file_lock
from zerokara.durable import PARTIAL_SUFFIX, made_folder, write_json
from zerokara.errors import Fault, UserError
from zerokara.progress import Progress, bytes_text, log
from zerokara.tokens.indexed import TokenPaths, bin_path
from zerokara.tokens.shards import ENDINGS, ShardResult, is_left_here, shard_path, unfinished_path

FORMAT = 9
"""Raised when the same plan would give other shards, or results of another form."""
PLAN_NAME = "plan.json"
RESULT = TypeAdapter(ShardResult)
_TURN_SECONDS = 60.0
"""Time for which a share of the work waits for others that begin at the same moment."""
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class ShardPlan:
    """Inputs of the shards; to resume from them, all but `task_bytes` must be equal."""

    files: list[list[Any]]
    """Corpus files as [name without its folder, bytes, time of change in ns or content id, source]."""
    tokenizer_sha256: str
    text_field: str
    txt_document: str
    task_bytes: int
    """The first run's size stays, however many workers a later run has."""
    format: int = FORMAT

    def differences(self, earlier: ShardPlan) -> list[str]:
        """Reasons why the shards of `earlier` do not serve this plan; of the files the first that differs."""
        names = ("tokenizer_sha256", "text_field", "txt_document", "format")
        pairs = [(name, getattr(earlier, name), getattr(self, name)) for name in names]
        pairs += next(([pair] for pair in zip_longest(["a file"], earlier.files, self.files) if pair[1] != pair[2]), [])
        return [f"{name} was {was}, here it is {now}" for name, was, now in pairs if was != now]


@contextmanager
def claimed(paths: TokenPaths, share: str = "") -> Iterator[Path]:
    """Claim the work folder for this run alone, or one `share` of the work (such as ``part-3-of-20``).

    Raises UserError if another run is at work there, or another on the same share.
    """
    folder = paths.work_folder
    with made_folder(folder.parent), ExitStack() as stack:
        with ExitStack() as turn:  # a share keeps others from beginning only as long as it begins itself
            whole = file_lock.held(paths.lock, _TURN_SECONDS if share else 0.0)
            lock, is_free = paths.lock, (turn if share else stack).enter_context(whole)
            folder.mkdir(exist_ok=True)
            for other in [folder / f"{share}.lock"] if share else folder.glob("*.lock"):
                if is_free:
                    lock, is_free = other, (stack if share else turn).enter_context(file_lock.held(other))
            if not is_free:
                rule = f"{file_lock.read_holder(lock) or 'another run of step 2'} is writing here"
                remedy = "wait for it, or choose another output_prefix"
                raise UserError(Fault(where=str(folder), rule=rule, remedy=remedy))
        try:
            yield folder
        finally:  # only under the lock: otherwise the files may be another run's
            if folder.is_dir():
                remove_unfinished(folder, is_alone=not share)
                # Kept if a shard is finished, or if nothing else shows that the token files beside it are step 2's.
                names = [paths.manifest, bin_path(paths.train), bin_path(paths.valid)]
                has_manifest, *has_tokens = (path.exists() for path in names)
                if not share and not any(folder.glob("*-*.json")) and (has_manifest or not any(has_tokens)):
                    shutil.rmtree(folder, ignore_errors=True)


def discard(paths: TokenPaths) -> None:
    """Remove the folder, unless another run is using it."""
    if paths.work_folder.is_dir():
        with suppress(UserError), claimed(paths) as folder:
            shutil.rmtree(folder, ignore_errors=True)


def settle(
    folder: Path, wanted: ShardPlan, merged: Collection[str] = (), is_shared: bool = False
) -> tuple[ShardPlan, dict[str, ShardResult]]:
    """Return the plan to follow and the finished shards by name: those of earlier runs if this one continues them.

    Shards that are `merged` are in the merged files already; their own files are deleted. Raises UserError if the work
    `is_shared`, and the others follow another plan.
    """
    if is_shared:  # write the plan, unless another share of the work has written one
        proposed = unfinished_path(folder / PLAN_NAME)
        write_json(proposed, wanted)
        with suppress(FileExistsError):
            os.link(proposed, folder / PLAN_NAME)
        proposed.unlink()
    earlier = None
    with suppress(FileNotFoundError, ValidationError):  # another OSError ends the step: the plan may be intact
        earlier = TypeAdapter(ShardPlan).validate_json((folder / PLAN_NAME).read_bytes())
    differing = wanted.differences(earlier) if earlier else ["there is no plan that can be read"]
    if differing and is_shared:
        rule = f"the work that was begun here is another: {'; '.join(differing)}"
        remedy = "give all parts the same settings and files (copy files with their times: cp -p, rsync -a)"
        raise UserError(Fault(str(folder), rule, remedy=f"{remedy}, or delete this folder to start over"))
    if differing or not earlier:
        if any(folder.glob("*-*.json")):
            log(f"  starting over, not from what an earlier run has finished: {'; '.join(differing)}")
        for left_over in folder.iterdir():
            if left_over.is_dir():
                shutil.rmtree(left_over)
            else:
                left_over.unlink(missing_ok=True)
        write_json(folder / PLAN_NAME, wanted)
        return wanted, {}
    remove_unfinished(folder, is_alone=not is_shared)
    finished = {}
    records = sorted(folder.glob("*-*.json"))
    with Progress("checking finished shards", len(records), "shard") as progress:
        for path in records:
            with suppress(ValidationError):
                result = RESULT.validate_json(path.read_bytes())
                # Shards of shares are synced, and one machine would have to read all of them; the merge checks each.
                if is_shared or result.name in merged or _is_undamaged(folder, result):
                    finished[result.name] = result
            if path.stem not in finished and not is_shared:
                path.unlink()
            progress.advance()
    return earlier, finished


def kept_text(folder: Path) -> str:
    """Phrase that tells what a failed run leaves for the next one."""
    if not (number := sum(1 for _ in folder.glob("*-*.json"))):
        return "nothing was written"
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return f"{number:,} finished shards ({bytes_text(size)}) are kept in {folder}"


def remove_unfinished(folder: Path, is_alone: bool) -> None:
    """Remove what was not finished; where others may be at work, only what ended processes of this machine left."""
    for path in folder.glob(f"*{PARTIAL_SUFFIX}"):
        if is_alone or is_left_here(path):
            path.unlink(missing_ok=True)


def _is_undamaged(folder: Path, result: ShardResult) -> bool:
    """True if the files of a shard have the sizes and checksums of its result."""
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
