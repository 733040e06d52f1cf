"""Corpus → token files: cut into tasks, encode in worker processes, merge in corpus order.

The result depends on the corpus, the tokenizer and the settings, never on the number of workers, nor on how often the
work was interrupted. Everything is written in a work folder beside the output; the final names appear at the end. The
folder keeps what is finished until the step has written its manifest, so that the same command resumes after any
interruption.
"""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from zerokara import hashing
from zerokara.config.data import DataSettings
from zerokara.corpus.find import InputFile, check_unchanged
from zerokara.corpus.read import total_plain_bytes
from zerokara.errors import RunError, UserError, shown
from zerokara.hashing import FileKey
from zerokara.progress import Progress, bytes_text, count_text, log
from zerokara.resources import available_cores
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.fast_encoder import EncoderChoice, FastEncoderDiffersError, sentencepiece_itself
from zerokara.tokens import corpus_content, quarantine, work_folder
from zerokara.tokens.accounts import (
    SourceTally,
    check_bad_fraction,
    count_sources,
    damaged_text,
    reasons_text,
    see,
    total,
)
from zerokara.tokens.cluster import reports, slurm
from zerokara.tokens.corpus_content import FileRecord
from zerokara.tokens.indexed import dtype_for
from zerokara.tokens.layout import TokenPaths
from zerokara.tokens.merge import MergeState, merge_shards
from zerokara.tokens.shards import Job, ShardResult, Tally, shard_path
from zerokara.tokens.tasks import TaskQueue, cut, num_workers, usual_task_bytes
from zerokara.tokens.workers import run_in_workers

RunTasks = Callable[[Job, TaskQueue, int], Generator[Tally | ShardResult, None, None]]
"""Does the tasks of a queue with so many workers, as `run_in_workers`."""


@dataclass(frozen=True)
class EncodedCorpus:
    """What was written."""

    sources: list[SourceTally]
    encoder_name: str
    """The encoder that did the work."""
    resumed_shards: int
    """Shards taken over from an interrupted run."""
    done: Tally
    """What this run itself encoded."""
    seconds: float
    """Time that took."""
    hashes: dict[FileKey, str]
    """SHA-256 of the corpus files on a disk."""


def encode_corpus(
    config: DataSettings,
    files: Sequence[InputFile],
    encoder: Encoder,
    choice: EncoderChoice,
    task_bytes: int | None = None,
    run_tasks: RunTasks = run_in_workers,
) -> EncodedCorpus:
    """Write the token files and the quarantine file of `config.output_prefix` with the chosen encoder.

    The work folder stays until `work_folder.discard`, which is called once the manifest is written.

    Raises:
        UserError: too many bad lines, no documents, too few to split, another run at work on the same output.
        RunError: a worker died, the disk is full, the corpus changed meanwhile.
    """
    paths = TokenPaths(config.output_prefix)
    wanted = work_folder.ShardPlan(
        files=[FileRecord.of(file) for file in files],
        tokenizer_sha256=encoder.sha256,
        text_field=config.text_field,
        txt_document=config.txt_document,
        task_bytes=task_bytes or usual_task_bytes(config, total_plain_bytes(files)),
        encoder=choice.name,
    )
    with _foreseen_errors(paths), work_folder.claimed(paths) as folder, ExitStack() as stack:
        if config.cluster != "slurm":
            slurm.end_leftover(folder)
        end_leftover = partial(slurm.end_leftover, folder)
        last_merged = MergeState.read(folder, config).last_shard
        plan, finished = work_folder.settle(folder, wanted, files, last_merged, end_leftover)
        # Where others encode, this machine's cores have nothing else to do.
        threads = None if config.cluster == "none" else min(hashing.MAX_THREADS, available_cores())
        hashes = stack.enter_context(corpus_content.hashed_beside_the_work(folder, files, threads))
        if plan.encoder.startswith("sentencepiece") and not choice.name.startswith("sentencepiece"):
            choice = sentencepiece_itself(encoder, "")
        if finished:
            size = sum(result.done.text_bytes for result in finished.values())
            log(f"  resuming: {len(finished):,} shards of {bytes_text(size)} of text were finished before")
        resumed, started = len(finished), time.monotonic()
        try:
            queue, done = _encode(config, files, choice, plan, folder, finished, run_tasks)
        except FastEncoderDiffersError as difference:
            what = f"{choice.name} gave other ids than SentencePiece for {difference.excerpt}"
            log(f"  {what}: starting over with SentencePiece")
            choice, resumed, finished = sentencepiece_itself(encoder, ""), 0, {}
            plan = replace(plan, encoder=choice.name)
            work_folder.restart(folder, plan)
            queue, done = _encode(config, files, choice, plan, folder, finished, run_tasks)
        seconds = time.monotonic() - started
        check_unchanged(files)
        file_hashes = hashes.result()
        reports.check_hashes(folder, file_hashes)
        tasks = queue.tasks
        bad = [(shard_path(folder, task.name, "bad"), task.ranges, finished[task.name].num_lines) for task in tasks]
        quarantine.collect(bad, paths.quarantine)
        sources = count_sources(len(config.input_jsonl), tasks, finished)
        _check_sources(config, sources, paths)
        merge_shards(config, tasks, finished, folder, paths, dtype_for(encoder.vocab_size), sources)
    return EncodedCorpus(sources, choice.name, resumed, done, seconds, file_hashes)


def _encode(
    config: DataSettings,
    files: Sequence[InputFile],
    choice: EncoderChoice,
    plan: work_folder.ShardPlan,
    folder: Path,
    finished: dict[str, ShardResult],
    run_tasks: RunTasks,
) -> tuple[TaskQueue, Tally]:
    """Do the unfinished tasks and add their results to `finished`."""
    ended = [name for name, result in finished.items() if result.at_end]
    queue = TaskQueue(cut(files, plan.task_bytes, config.txt_document), finished, ended)
    job = Job(choice.encoder, folder, config.text_field, config.txt_document, is_synced=config.cluster != "none")
    done, started = Tally(), time.monotonic()
    before = sum(result.done.file_bytes for result in finished.values())
    if queue.is_empty:
        return queue, done
    messages = run_tasks(job, queue, num_workers(config, files))
    total_bytes = sum(file.bytes for file in files)
    with closing(messages), Progress("tokenise", total_bytes, "B", done=before) as progress:
        for message in messages:
            if isinstance(message, ShardResult):
                finished[message.name] = message
                continue
            done.add(message)
            seconds = max(time.monotonic() - started, 1e-9)
            rates = {
                "text": f"{bytes_text(done.text_bytes / seconds)}/s",
                "docs/s": count_text(done.documents / seconds),
                "tokens/s": count_text(done.tokens / seconds),
            }
            progress.note(**rates)
            progress.advance(message.file_bytes)
    return queue, done


def _check_sources(config: DataSettings, sources: Sequence[SourceTally], paths: TokenPaths) -> None:
    whole = total(sources)
    check_bad_fraction(config, whole, paths)
    if not whole.documents:
        why = f": {reasons_text(whole.skipped)}" if whole.skipped else ""
        why += f"; damaged: {damaged_text(whole.damaged)}" if whole.damaged else ""
        rule = f"the corpus holds no document with text{why}"
        raise UserError(config.fault("input_jsonl", rule, see(paths, whole.skipped)))


@contextmanager
def _foreseen_errors(paths: TokenPaths) -> Iterator[None]:
    """Turn errors of the operating system into run errors that say what is kept of the work."""
    try:
        yield
    except OSError as error:
        kept = work_folder.kept_text(paths.work_folder)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            folder = paths.manifest.parent
            existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
            free = bytes_text(shutil.disk_usage(existing).free)
            raise RunError(
                f"the disk is full ({error.strerror}) at {folder.absolute()}, {free} are free there now that "
                f"unfinished files are removed; {kept}. Make room and run the same command to resume, or set "
                "output_prefix to another disk"
            ) from error
        where = f" {shown(str(error.filename))}" if error.filename else ""
        raise RunError(f"cannot read or write{where}: {error.strerror or error}; {kept}") from error
