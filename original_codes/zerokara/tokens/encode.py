"""Corpus → token files: cut into tasks, encode in worker processes, merge in corpus order.

The result depends on the corpus, the tokenizer and the settings, never on the number of workers, nor on how often the
work was interrupted. Everything is written in a work folder beside the output; the final names appear at the end. The
folder keeps what is finished until the step has written its manifest, so that the same command goes on after whatever
ended it.
"""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from zerokara.config.data_settings import DataSettings
from zerokara.corpus.inputs import InputFile, check_unchanged
from zerokara.corpus.sizes import total_plain_bytes
from zerokara.errors import RunError, UserError, shown
from zerokara.progress import Progress, bytes_text, count_text
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.encoder_choice import EncoderChoice, sentencepiece_itself
from zerokara.tokenizer.fast_encoder import FastEncoderDiffersError
from zerokara.tokenizer.tokenizer_facts import TokenizerFacts
from zerokara.tokens import work_folder
from zerokara.tokens.accounts import (
    SourceTally,
    check_bad_fraction,
    count_sources,
    damaged_text,
    reasons_text,
    see,
    total,
)
from zerokara.tokens.indexed import dtype_for
from zerokara.tokens.layout import TokenPaths
from zerokara.tokens.merge import MergeState, merge_shards, write_quarantine
from zerokara.tokens.shards import Job, ShardResult, Tally
from zerokara.tokens.tasks import TaskQueue, num_workers, usual_task_bytes
from zerokara.tokens.workers import Workers


@dataclass(frozen=True)
class Encoded:
    """What was written."""

    sources: list[SourceTally]
    encoder: str
    """The name of the encoder that did the work."""
    resumed_shards: int
    """Shards that were taken over from a run that had been ended."""
    encoded: Tally
    """What this run itself encoded."""
    seconds: float
    """That it took for this."""


def encode_corpus(
    config: DataSettings,
    files: Sequence[InputFile],
    encoder: Encoder | TokenizerFacts,
    choice: EncoderChoice | None = None,
    workers: Workers | None = None,
    task_bytes: int | None = None,
    log: Callable[[str], None] = print,
) -> Encoded:
    """Write the token files and the quarantine file of `config.output_prefix`, by the encoder that was chosen.

    `workers` may have been started beforehand; more are started when they are needed. What lies in the work folder
    stays until `discard_work`, to be called when the manifest is written.

    Raises:
        UserError: too many bad lines, no documents, too few to split, another run at work on the same output.
        RunError: a worker died, the disk is full, the corpus changed meanwhile.
    """
    paths = TokenPaths(config.output_prefix)
    choice = choice or sentencepiece_itself(encoder, "")
    if task_bytes is None:
        task_bytes = usual_task_bytes(config, total_plain_bytes(files))
    wanted = work_folder.Plan(
        files=work_folder.files_as_listed(files),
        tokenizer_sha256=encoder.sha256,
        text_field=config.text_field,
        txt_document=config.txt_document,
        task_bytes=task_bytes,
        encoder=choice.name,
    )
    with _foreseen_errors(paths), work_folder.claimed(paths) as folder:
        plan, finished = work_folder.settle(folder, wanted, MergeState.read(folder, config).last_shard)
        if plan.encoder.startswith("sentencepiece") and not choice.name.startswith("sentencepiece"):
            choice = sentencepiece_itself(encoder, "")
        if finished:
            size = sum(result.done.text_bytes for result in finished.values())
            log(f"  going on: {len(finished):,} shards of {bytes_text(size)} of text were finished before")
        resumed, started = len(finished), time.monotonic()
        try:
            queue, done = _encode(config, files, choice, plan, folder, finished, workers)
        except FastEncoderDiffersError as difference:
            what = f"{choice.name} gave other ids than SentencePiece for {difference.excerpt}"
            log(f"  {what}: SentencePiece does it all anew")
            choice, resumed = sentencepiece_itself(encoder, ""), 0
            plan = replace(plan, encoder=choice.name)
            work_folder.begin_anew(folder, plan)
            finished = {}
            queue, done = _encode(config, files, choice, plan, folder, finished, None)
        seconds = time.monotonic() - started
        check_unchanged(files)
        tasks = [queue.task(name) for name in queue.names]
        write_quarantine(tasks, finished, folder, paths)
        sources = count_sources(len(config.input_jsonl), tasks, finished)
        _check_sources(config, sources, paths)
        merge_shards(config, tasks, finished, folder, paths, dtype_for(encoder.vocab_size), sources)
    return Encoded(sources, choice.name, resumed, done, seconds)


def discard_work(config: DataSettings) -> None:
    """Remove the work folder: the manifest is written, nothing in it is needed any more."""
    work_folder.discard(TokenPaths(config.output_prefix))


def _encode(
    config: DataSettings,
    files: Sequence[InputFile],
    choice: EncoderChoice,
    plan: work_folder.Plan,
    folder: Path,
    finished: dict[str, ShardResult],
    workers: Workers | None,
) -> tuple[TaskQueue, Tally]:
    """Do the tasks that are not finished yet, and put their results among those that are."""
    ended = [name for name, result in finished.items() if result.at_end]
    queue = TaskQueue(files, plan.task_bytes, config.txt_document, finished, ended)
    job = Job(choice.open_encoder, folder, config.text_field, config.txt_document)
    done, started = Tally(), time.monotonic()
    before = sum(result.done.file_bytes for result in finished.values())
    if queue.is_empty:
        return queue, done
    workers = workers or Workers(num_workers(config, files))
    with workers, Progress("tokenise", sum(file.bytes for file in files), "B", done=before) as progress:
        for message in workers.run(job, queue):
            if isinstance(message, ShardResult):
                finished[message.name] = message
                continue
            done.file_bytes += message.file_bytes
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
    """Word the operating system's errors, and say what is kept of the work."""
    try:
        yield
    except OSError as error:
        kept = _kept(paths)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            folder = paths.manifest.parent
            there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
            free = bytes_text(shutil.disk_usage(there).free)
            raise RunError(
                f"the disk is full ({error.strerror}) at {folder.absolute()}, {free} are free there now that "
                f"unfinished files are removed; {kept}. Make room and run the same command to go on, or set "
                "output_prefix elsewhere"
            ) from error
        where = f" {shown(str(error.filename))}" if error.filename else ""
        raise RunError(f"cannot read or write{where}: {error.strerror or error}; {kept}") from error


def _kept(paths: TokenPaths) -> str:
    number, size = work_folder.kept_shards(paths.work_folder)
    if not number:
        return "nothing was written"
    return f"{number:,} finished shards ({bytes_text(size)}) are kept in {paths.work_folder}"
