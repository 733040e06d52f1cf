"""Corpus → token files: cut into tasks, encode in worker processes, merge in corpus order.

The result depends on the corpus, the tokenizer and the settings, never on the number of workers. Everything is
written in a work folder beside the output; the final names appear at the end, and the folder goes whatever happens.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from zerokara.config.pretrain_config import DataSettings
from zerokara.corpus.inputs import InputFile
from zerokara.corpus.reading import HARMLESS, ByteRange, ranges
from zerokara.errors import Fault, RunError, UserError
from zerokara.progress import Progress, bytes_text, count_text
from zerokara.tokens.indexed import dtype_for
from zerokara.tokens.layout import TokenPaths
from zerokara.tokens.merge import SourceTally, merge_shards, write_quarantine
from zerokara.tokens.shards import Job, ShardResult, Tally, Task, TextEncoder
from zerokara.tokens.workers import available_cores, run_tasks

MIN_TASK_BYTES, MAX_TASK_BYTES = 1024 * 1024, 32 * 1024 * 1024
TASKS_A_WORKER = 16
"""Enough that all workers end at about the same time."""


def num_workers(config: DataSettings) -> int:
    """Worker processes, with `auto` resolved to one a core."""
    return available_cores() if config.num_workers == "auto" else config.num_workers


def encode_corpus(
    config: DataSettings,
    files: Sequence[InputFile],
    open_encoder: Callable[[], TextEncoder],
    vocab_size: int,
    task_bytes: int | None = None,
) -> list[SourceTally]:
    """Write the token files and the quarantine file of `config.output_prefix`; gives a tally for each source.

    `open_encoder` must be picklable: each worker calls it once.

    Raises:
        UserError: too many bad lines, no documents, too few to split, another run at work on the same output.
        RunError: a worker died, the disk is full, the corpus changed meanwhile.
    """
    paths, workers = TokenPaths(config.output_prefix), num_workers(config)
    total = sum(file.bytes for file in files)
    if task_bytes is None:
        task_bytes = min(max(total // (workers * TASKS_A_WORKER), MIN_TASK_BYTES), MAX_TASK_BYTES)
    tasks = plan_tasks(config, files, task_bytes)
    with _foreseen_errors(paths), _work_folder(paths) as folder:
        job = Job(open_encoder, folder, config.text_field, config.txt_document)
        results = _run(job, tasks, workers, total)
        _check_unchanged(files)
        write_quarantine(tasks, results, folder, paths)
        _check_bad_fraction(config, results, paths)
        return merge_shards(config, tasks, results, folder, paths, dtype_for(vocab_size))


def plan_tasks(config: DataSettings, files: Sequence[InputFile], task_bytes: int) -> list[Task]:
    """Gather consecutive ranges of one source into tasks of about `task_bytes`."""
    tasks: list[Task] = []
    gathered: list[ByteRange] = []

    def close() -> None:
        if gathered:
            tasks.append(Task(len(tasks), gathered[0].file.source, tuple(gathered)))
            gathered.clear()

    size = 0
    for range_ in ranges(files, task_bytes, config.txt_document):
        if gathered and (size + range_.bytes > task_bytes or gathered[0].file.source != range_.file.source):
            close()
            size = 0
        gathered.append(range_)
        size += range_.bytes
    close()
    return tasks


def _run(job: Job, tasks: Sequence[Task], workers: int, total_bytes: int) -> dict[int, ShardResult]:
    results: dict[int, ShardResult] = {}
    done, started = Tally(), time.monotonic()
    with Progress("tokenise", total_bytes, "B") as progress:
        for message in run_tasks(job, tasks, workers):
            if isinstance(message, ShardResult):
                results[message.number] = message
                continue
            done.documents += message.documents
            done.tokens += message.tokens
            done.text_bytes += message.text_bytes
            seconds = max(time.monotonic() - started, 1e-9)
            rates = {
                "text": f"{bytes_text(done.text_bytes / seconds)}/s",
                "docs/s": count_text(done.documents / seconds),
                "tokens/s": count_text(done.tokens / seconds),
            }
            progress.note(**rates)
            progress.advance(message.file_bytes)
    return results


def _check_unchanged(files: Sequence[InputFile]) -> None:
    for file in files:
        status = file.path.stat()
        if (status.st_size, status.st_mtime_ns) != (file.bytes, file.modified_ns):
            raise RunError(
                f"{file.path} changed while it was read (it had {file.bytes:,} bytes, now {status.st_size:,}); "
                "nothing was written; run again when it is complete"
            )


def _check_bad_fraction(config: DataSettings, results: dict[int, ShardResult], paths: TokenPaths) -> None:
    skipped: Counter[str] = sum((result.skipped for result in results.values()), Counter())
    documents = sum(result.documents for result in results.values())
    check_bad_fraction(config, documents, skipped, paths)
    if documents == 0:
        rule = "the corpus holds no document with text" + (f": {reasons_text(skipped)}" if skipped else "")
        raise UserError(config.fault("input_jsonl", rule, see(paths, skipped)))


def check_bad_fraction(config: DataSettings, documents: int, skipped: Counter[str], paths: TokenPaths) -> None:
    """Check the share of bad lines among all that are not merely empty.

    Raises:
        UserError: it is above `max_bad_fraction`; names the counts by reason and the quarantine file.
    """
    bad = sum(count for reason, count in skipped.items() if reason not in HARMLESS)
    if bad > config.max_bad_fraction * (documents + bad):
        share = bad / (documents + bad)
        rule = f"{bad:,} of {documents + bad:,} documents are bad ({share:.3g} of them): {reasons_text(skipped)}"
        remedy = f"{see(paths, skipped)}; mend the corpus, or set max_bad_fraction above {share:.3g}"
        raise UserError(config.fault("max_bad_fraction", rule, remedy))


def reasons_text(skipped: Counter[str]) -> str:
    """``broken JSON 12, empty text 3``."""
    return ", ".join(f"{reason} {count:,}" for reason, count in skipped.most_common())


def see(paths: TokenPaths, skipped: Counter[str]) -> str:
    """Where the bad lines are listed."""
    return f"each is listed in {paths.quarantine}" if skipped else ""


@contextmanager
def _work_folder(paths: TokenPaths) -> Iterator[Path]:
    """An empty folder for this run alone; what a killed run left in it is removed."""
    folder = paths.work_folder
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            rule = "another run of step 2 is writing here"
            remedy = "wait for it, or choose another output_prefix"
            raise UserError(Fault(where=str(folder), rule=rule, remedy=remedy)) from None
        for left_over in folder.iterdir():
            shutil.rmtree(left_over)
        # Of its own for each run: a worker that a killed run left behind may still be writing its last shard.
        shards = folder / str(os.getpid())
        shards.mkdir()
        try:
            yield shards
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


@contextmanager
def _foreseen_errors(paths: TokenPaths) -> Iterator[None]:
    """Word the operating system's errors; measured here, after the work folder has gone, free space says little."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            folder = paths.manifest.parent
            free = shutil.disk_usage(folder).free
            raise RunError(
                f"the disk is full ({error.strerror}) at {folder.absolute()}; nothing was written. {bytes_text(free)} "
                "are free there now that the unfinished files are removed: make room, or set output_prefix elsewhere"
            ) from error
        where = f" {error.filename}" if error.filename else ""
        raise RunError(f"cannot read or write{where}: {error.strerror}; nothing was written") from error
