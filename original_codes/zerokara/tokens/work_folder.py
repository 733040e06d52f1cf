"""The folder in which step 2 works, with the shards that are finished, and who may work there.

A run works there alone, or does one part of the work beside others, on this machine or on another that sees the disk.

``plan.json`` says what the shards are made from: the files, the tokenizer, the settings that change a shard, the size
of a task. A run with the same plan takes over the finished shards; one with another plan starts over, and a part of
the work with another plan is refused. A shard is finished when its ``<name>.json`` is there, which is written last, and
its files have the sizes recorded in it: a run that works alone syncs nothing on the way, so a power cut may lose any of
them. The merge compares their checksums.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from zerokara.base import file_lock
from zerokara.base.durable import PARTIAL_SUFFIX, made_folder, read_back, remove_folder, write_json
from zerokara.base.errors import Fault, UserError
from zerokara.base.progress import Progress, bytes_text, log, plural
from zerokara.tokens.indexed import TokenPaths, bin_path
from zerokara.tokens.shards import ShardResult, shard_path, unfinished_path

FORMAT = 11
"""Raised when the same plan would give other shards, or results of another form."""
SHARD_PLAN_NAME = "plan.json"
RESULT = TypeAdapter(ShardResult)
_BEGIN_SECONDS = 60.0
"""Time for which a part of the work waits for others that begin at the same moment."""


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

    def differences(self, earlier: Self) -> list[str]:
        """Reasons why the shards of `earlier` do not serve this plan; of the files the first that differs."""
        names = ("tokenizer_sha256", "text_field", "txt_document", "format")
        pairs = [(name, getattr(earlier, name), getattr(self, name)) for name in names]
        differing = [f"{name} was {was}, here it is {now}" for name, was, now in pairs if was != now]
        changed = (pair for pair in zip_longest(earlier.files, self.files) if pair[0] != pair[1])
        for was, now in islice(changed, 1):
            before, here = (f"{file[0]} of {file[1]:,} bytes" if file else "no file" for file in (was, now))
            same = "another time of change or content" if before == here else here
            differing.append(f"{before} was read, and here is {same}")
        return differing


@contextmanager
def claimed(paths: TokenPaths, part: str = "") -> Iterator[Path]:
    """Lock the work folder for this run alone, or for one part of the work (such as ``encode-3-of-20``).

    Raises UserError if another run is at work there, or another on the same part.
    """
    folder = paths.work_folder
    with made_folder(folder.parent), ExitStack() as until_the_end:
        with ExitStack() as for_now:  # a part keeps others from beginning only as long as it begins itself
            lock, others = paths.lock, [folder / f"{part}.lock"] if part else []
            is_free = (for_now if part else until_the_end).enter_context(
                file_lock.held(lock, _BEGIN_SECONDS if part else 0.0)
            )
            folder.mkdir(exist_ok=True)
            for other in others or folder.glob("*.lock"):
                if is_free:
                    lock = other
                    is_free = (until_the_end if part else for_now).enter_context(file_lock.held(other))
            if not is_free:
                rule = f"{file_lock.read_holder(lock) or 'another run of step 2'} is writing here"
                remedy = "wait for it, or choose another output_prefix"
                raise UserError(Fault(where=str(folder), rule=rule, remedy=remedy))
        try:
            yield folder
        finally:  # only under the lock: otherwise the files may be another run's
            if not part and folder.is_dir():
                remove_unfinished(folder)
                # Kept if a shard is finished, or if nothing else shows that the token files beside it are step 2's.
                names = [paths.manifest, bin_path(paths.train), bin_path(paths.valid)]
                has_manifest, *has_tokens = (path.exists() for path in names)
                if not any(folder.glob("*-*.json")) and (has_manifest or not any(has_tokens)):
                    remove_folder(folder)


def discard(paths: TokenPaths) -> None:
    """Remove the folder, unless another run is using it."""
    if paths.work_folder.is_dir():
        with suppress(UserError), claimed(paths) as folder:
            remove_folder(folder)


def write_once(path: Path, content: Any) -> dict[str, Any]:
    """Write JSON, unless there is such a file already, of whoever came first; return what is there."""
    proposed = unfinished_path(path)
    write_json(proposed, content)
    with suppress(FileExistsError):
        try:
            os.link(proposed, path)
        except OSError:  # a file system without links; or there is one, which the next line finds
            with open(path, "xb") as file:
                file.write(proposed.read_bytes())
    proposed.unlink()
    return read_back(path, "delete its folder to start over")


def reconcile(
    folder: Path, wanted: ShardPlan, copied: Collection[str], is_shared: bool
) -> tuple[ShardPlan, dict[str, ShardResult]]:
    """Return the plan to follow and the finished shards by name: those of earlier runs if this one continues them.

    The ids of shards that are `copied` are in the merged files already. Raises UserError if the work `is_shared`, and
    the others follow another plan.
    """
    if is_shared:
        write_once(folder / SHARD_PLAN_NAME, wanted)
    earlier = None
    with suppress(FileNotFoundError, ValidationError):  # another OSError ends the step: the plan may be intact
        earlier = TypeAdapter(ShardPlan).validate_json((folder / SHARD_PLAN_NAME).read_bytes())
    differing = wanted.differences(earlier) if earlier else ["there is no plan that can be read"]
    if differing and is_shared:
        rule = f"the work begun here differs from this one: {'; '.join(differing)}"
        remedy = "give all parts the same settings and files (copy files with their times: cp -p, rsync -a)"
        raise UserError(Fault(str(folder), rule, remedy=f"{remedy}, or delete this folder to start over"))
    records = sorted(folder.glob("*-*.json"))
    if differing or not earlier:
        if records:
            log(f"  starting over, not from what an earlier run has finished: {'; '.join(differing)}")
        remove_folder(folder)
        folder.mkdir()
        write_json(folder / SHARD_PLAN_NAME, wanted)
        return wanted, {}
    if not is_shared:
        remove_unfinished(folder)
    finished = {}
    with Progress("checking finished shards", len(records), "shard") as progress:
        for path in records:
            with suppress(ValidationError):
                result = RESULT.validate_json(path.read_bytes())
                if is_shared or result.name in copied or _is_whole(folder, result):  # those of parts are synced
                    finished[result.name] = result
            progress.advance()
    return earlier, finished


def kept_text(folder: Path) -> str:
    """Phrase that tells what a failed run leaves for the next one."""
    if not (number := sum(1 for _ in folder.glob("*-*.json"))):
        return "nothing was written"
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return f"{plural(number, 'finished shard')} ({bytes_text(size)}) kept in {folder}"


def remove_unfinished(folder: Path) -> None:
    """Remove what was not finished, where nobody else is at work."""
    for path in folder.glob(f"*{PARTIAL_SUFFIX}"):
        path.unlink(missing_ok=True)


def _is_whole(folder: Path, result: ShardResult) -> bool:
    """True if the files of a shard have the sizes of its result."""
    paths = ((shard_path(folder, result.name, ending), size) for ending, (size, _) in result.files.items())
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)
