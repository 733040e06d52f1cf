"""Corpus → token files: cut into tasks, encode in worker processes, merge in corpus order.

The step deals out the tasks through a pool of the standard library. It takes them from several input streams at once,
each of which unpacks a file in a thread, and keeps a few more tasks under way than there are workers. multiprocessing's
fork server forks the workers. It is a process without threads that has imported what they need: they start within
milliseconds.

The result depends on the corpus, the tokenizer and the settings, never on the number of workers, nor on how often the
work was interrupted. Everything is written in a work folder beside the output; the final names appear at the end. The
folder keeps what is finished until the step has written its manifest, so that the same command resumes after any
interruption.
"""

import errno
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from zerokara.base.errors import NO_ROOM, Fault, RunError, UserError, shown
from zerokara.base.manifest import FileKey, file_key
from zerokara.base.progress import Progress, bytes_text, count_text, first_of, log, plural, seconds_text
from zerokara.base.resources import ended, free_bytes, start_fork_server
from zerokara.config.data import DataSettings
from zerokara.corpus.find import FoundFiles, InputFile, check_unchanged
from zerokara.corpus.read import total_plain_bytes
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.fast_encoder import EncoderChoice
from zerokara.tokenizer.model_file import SPACE_MARK
from zerokara.tokens import merge, shards, work_folder
from zerokara.tokens.held_out import num_copies
from zerokara.tokens.indexed import TokenPaths, dtype_for, open_splits
from zerokara.tokens.quarantine import SourceTally, check_bad_fraction, count_sources, write_quarantine
from zerokara.tokens.shard_tasks import WHOLE, Part, expected, input_streams, num_workers, usual_task_bytes
from zerokara.tokens.shards import Job, ShardResult, ShardTask, begin_worker, write_shard_in_worker

PRELOADED = (shards.__name__, "gigatoken")
"""What the fork server of the workers imports."""
OPEN_STREAMS = 4
"""Packed files that are unpacked at once; zlib and zstd release the interpreter's lock."""
Stage = Literal["all", "encode", "merge"]


@dataclass(frozen=True)
class EncodedCorpus:
    """Result of step 2, for its manifest and summary."""

    sources: list[SourceTally]
    """Empty after a stage that only encodes."""
    encoder_name: str
    resumed_shards: int
    """Number of shards taken over from an interrupted run."""
    text_bytes: int
    """Bytes of text that this run itself encoded, within `seconds`."""
    seconds: float
    hashes: dict[FileKey, str]
    """SHA-256 of the corpus files on a disk."""
    space_marks: int
    """Documents with U+2581, which this tokenizer decodes to a space; 0 where it does not."""
    unknown: int
    """Unknown tokens, whose characters are lost."""


def encode_corpus(
    config: DataSettings,
    files: Sequence[InputFile],
    encoder: Encoder,
    choice: EncoderChoice,
    stage: Stage = "all",
    part: Part = WHOLE,
) -> EncodedCorpus:
    """Write the token files and the quarantine file of `config.output_prefix` with the chosen encoder.

    As a `stage` on several machines only encode a part, or only merge a part of what all have encoded; the merge of the
    whole ends the work. The work folder stays until `work_folder.discard`.

    Raises:
        UserError: too many bad lines, no documents, too few to split, another run at work on the same output; of a
            part, another plan than that of the others; of the merge, a task that is not done.
        RunError: a worker died, the disk is full, the corpus changed meanwhile.
    """
    paths, sources, hashes = TokenPaths(config.output_prefix), list[SourceTally](), dict[FileKey, str]()
    wanted = work_folder.ShardPlan(
        files=[[shown(file.path.name), file.bytes, file.version, file.source] for file in files],
        tokenizer_sha256=encoder.sha256,
        text_field=config.text_field,
        txt_document=config.txt_document,
        task_bytes=usual_task_bytes(config, total_plain_bytes(files, config.text_field)),
    )
    is_alone = stage == "all" or (stage == "merge" and part == WHOLE)
    with _foreseen_errors(paths), work_folder.claimed(paths, "" if is_alone else f"{stage}-{part}") as folder:
        plan, finished = work_folder.reconcile(folder, wanted, merge.copied(folder), is_shared=stage != "all")
        started, results = time.monotonic(), finished
        if stage != "merge":
            job = Job(choice.encoder, folder, config.text_field, config.txt_document, stage == "encode")
            todo, left_bytes = input_streams(files, plan.task_bytes, config.txt_document, part, finished)
            results = finished | encode(job, todo, num_workers(config, files), left_bytes, finished.values())
        seconds = time.monotonic() - started
        check_unchanged(files)
        if stage != "encode":
            tasks, missing = expected(files, plan.task_bytes, config.txt_document, results)
            if missing:
                rule = f"at least {len(missing):,} of {len(tasks):,} shards are not made yet (first {missing[0]})"
                remedy = "start the parts again, each does what is left; or run step 2 on this machine alone"
                raise UserError(Fault(str(folder), rule, remedy=remedy))
            if part.number == 0:  # one of the machines that merge
                write_quarantine(tasks, results, folder, paths.quarantine)
            ranges = [pair for task in tasks for pair in zip(task.ranges, results[task.name].ranges, strict=True)]
            sources = count_sources(len(config.entries), ranges)
            check_bad_fraction(config, sum(sources, SourceTally()), paths)
            hashes = {file_key(range_.file.path): held.sha256 for range_, held in ranges if held.sha256}
            _warn_of_equal_files(hashes)
            merged = merge.Merge(config, folder, tasks, results, sources, dtype_for(encoder.vocab_size))
            merged.copy(part)
            if part == WHOLE:
                merged.give_final_names(paths)
    made = [result for name, result in results.items() if result is not finished.get(name)]
    keeps_mark = encoder.decode(encoder.encode(SPACE_MARK)) == SPACE_MARK
    return EncodedCorpus(
        sources,
        encoder_name=choice.name,
        resumed_shards=len(results) - len(made),
        text_bytes=sum(result.text_bytes for result in made),
        seconds=seconds,
        hashes=hashes,
        space_marks=0 if keeps_mark else sum(result.space_marks for result in results.values()),
        unknown=sum(result.unknown for result in results.values()),
    )


def _warn_of_equal_files(hashes: dict[FileKey, str]) -> None:
    firsts = {content: key.path for key, content in reversed(hashes.items())}
    for key, content in hashes.items():
        if key.bytes and firsts[content] != key.path:
            log(f"warning: {key.path} holds the same as {firsts[content]}: its documents are there twice")


def encode(
    job: Job,
    todo: Iterable[Iterator[ShardTask]],
    num_workers: int,
    left_bytes: int,
    finished: Collection[ShardResult],
) -> dict[str, ShardResult]:
    """Run the tasks of all input streams, of about `left_bytes` of the corpus; return their results by name.

    What was `finished` before is for the log and the progress bar.
    """
    if finished:
        size = sum(result.text_bytes for result in finished)
        log(f"  resuming: {plural(len(finished), 'shard')} of {bytes_text(size)} of text finished before")
    results, made, started = dict[str, ShardResult](), ShardResult(""), time.monotonic()
    before = 0 if job.is_synced else sum(result.disk_bytes for result in finished)  # of all parts
    with (
        closing(run_in_workers(job, todo, num_workers)) as done,
        Progress("tokenise", before + left_bytes, "B", done=before) as progress,
    ):
        for result in done:
            results[result.name] = result
            made.documents += result.documents
            made.tokens += result.tokens
            made.text_bytes += result.text_bytes
            seconds = max(time.monotonic() - started, 1e-9)
            rates = {
                "text": f"{bytes_text(made.text_bytes / seconds)}/s",
                "docs/s": count_text(made.documents / seconds),
                "tokens/s": count_text(made.tokens / seconds),
            }
            progress.set_postfix(rates, refresh=False)
            progress.advance(result.disk_bytes)
    return results


def run_in_workers(
    job: Job, input_streams: Iterable[Iterator[ShardTask]], num_workers: int
) -> Generator[ShardResult, None, None]:
    """Run the tasks of all input streams; yield results as they come, in no fixed order.

    Close the generator to end the workers early (`contextlib.closing`).

    Raises:
        RunError: a worker died.
        OSError: as the worker met it (a full disk, a file that is gone).
        UserError: a file that can never be read.
    """
    context = start_fork_server(PRELOADED)
    pool = ProcessPoolExecutor(num_workers, context, begin_worker, (job,))
    threads = ThreadPoolExecutor(OPEN_STREAMS)
    waiting, opened = iter(input_streams), list[Iterator[ShardTask]]()
    asked: dict[Future[ShardTask | None], Iterator[ShardTask]] = {}
    under_way: dict[Future[ShardResult], ShardTask] = {}
    try:
        with ended(pool):
            while True:
                while len(asked) < OPEN_STREAMS and len(asked) + len(under_way) < num_workers * 3 // 2 + 3:
                    stream = opened.pop(0) if opened else next(waiting, None)
                    if stream is None:
                        break
                    asked[threads.submit(next, stream, None)] = stream
                if not asked and not under_way:
                    return
                futures: list[Future[Any]] = [*asked, *under_way]
                done = wait(futures, return_when=FIRST_COMPLETED).done
                for answer in asked.keys() & done:
                    stream = asked.pop(answer)
                    if task := answer.result():
                        opened.append(stream)
                        under_way[pool.submit(write_shard_in_worker, task)] = task
                for future in under_way.keys() & done:
                    result = future.result()
                    del under_way[future]  # later, since a death is told with all tasks that were under way
                    yield result
    except BrokenProcessPool:
        firsts = [task.ranges[0] for task in under_way.values()][:num_workers]
        places = first_of([f"{first.file.name} from byte {first.start:,}" for first in firsts], 3)
        raise RunError(
            f"a tokenising process died at one of: {places}. Finished shards are kept, and the same command resumes; "
            "most often the machine ran out of memory: run again with fewer processes (--set num_workers=1)"
        ) from None
    finally:
        threads.shutdown(cancel_futures=True)


@contextmanager
def _foreseen_errors(paths: TokenPaths) -> Iterator[None]:
    """Turn errors of the operating system into run errors that say what is kept of the work."""
    try:
        yield
    except OSError as error:
        where = shown(str(error.filename or paths.work_folder))
        message = f"cannot read or write {where}: {error.strerror or error}; {work_folder.kept_text(paths.work_folder)}"
        if error.errno in NO_ROOM:
            free, folder = bytes_text(free_bytes(paths.manifest.parent)), paths.manifest.parent.absolute()
            reason = "a file is as large as ulimit -f allows" if error.errno == errno.EFBIG else "the disk is full"
            message += f"; {reason}: {free} are free at {folder} now that unfinished "
            message += "files are removed; make room and run the same command to resume, or set output_prefix to "
            message += "another disk"
        raise RunError(message) from error


def manifest_facts(config: DataSettings, files: FoundFiles, encoded: EncodedCorpus, encoder: Encoder) -> dict[str, Any]:
    """Facts for the manifest, beside settings, inputs and outputs: counts in total, by split and by source."""
    sources = [
        {"entry": entry, "files": sum(file.source == source for file in files), **tally.facts()}
        for source, ((_, entry), tally) in enumerate(zip(config.entries, encoded.sources, strict=True))
    ]
    whole = sum(encoded.sources, SourceTally())
    return {
        **whole.facts(),
        "documents_written": whole.train.documents + whole.valid.documents,
        "sources": sources,
        "text_bytes": whole.train.text_bytes + whole.valid.text_bytes,
        "text_bytes_per_second": round(encoded.text_bytes / max(encoded.seconds, 1e-9)),
        "encoder": encoded.encoder_name,
        "resumed_shards": encoded.resumed_shards,
        "documents_with_space_mark": encoded.space_marks,
        "unknown_tokens": encoded.unknown,
        "tokenizer_sha256": encoder.sha256,
        "vocab_size": encoder.vocab_size,
        "eos_id": encoder.eos_id,
        "start_id": encoder.start_id,
        "dtype": dtype_for(encoder.vocab_size).name,
        "left_out": files.left_out,
    }


def summary_rows(config: DataSettings, encoded: EncodedCorpus, seconds: float) -> list[tuple[str, str]]:
    """Rows of (name, value) for the screen; `seconds` are those of the whole step."""
    rows = []
    for (_, entry), tally in zip(config.entries, encoded.sources, strict=True):
        lost = f" ({bytes_text(tally.bytes_lost)} of {bytes_text(tally.bytes_in)} bad)" if tally.bytes_lost else ""
        rows.append((shown(entry), f"{tally.documents_in:,} documents in, {tally.skipped.total():,} skipped{lost}"))
        for name, split in (("  train", tally.train), ("  valid", tally.valid)):
            text = f"{split.documents:,} documents, {split.tokens:,} tokens, {bytes_text(split.text_bytes)} of text"
            rows.append((name, text))
    whole = sum(encoded.sources, SourceTally())
    if whole.skipped:
        rows.append(("skipped", f"{whole.reasons}; listed in {TokenPaths(config.output_prefix).quarantine}"))
    if whole.damaged:
        rows.append(("damaged", f"{plural(len(whole.damaged), 'file')}: {whole.damages}"))
    train, valid = open_splits(config.output_prefix)
    if valid is not None and (copies := num_copies(train, valid)):
        rule = f"{copies:,} of {plural(len(valid), 'validation document')} are in the training text, too, word for word"
        rows.append(("warning", f"{rule}, and make the model look better than it is; step 0 drops copies"))
    time_text = seconds_text(seconds)
    if encoded.text_bytes:
        time_text += f"; encoding {bytes_text(encoded.text_bytes / max(encoded.seconds, 1e-9))}/s of text"
    if encoded.resumed_shards:
        time_text += f", after {plural(encoded.resumed_shards, 'shard')} that an earlier run had finished"
    losses = [f"{encoded.space_marks:,} documents hold U+2581, which decodes to a space"] if encoded.space_marks else []
    losses += [f"{encoded.unknown:,} tokens are <unk>"] if encoded.unknown else []
    rows += [("text lost", ", ".join(losses))] if losses else []
    return [*rows, ("time", time_text)]
