"""Token files and their manifest as step 2 leaves them, written in this process: no worker processes, no command line.

`write_tokens` takes a configuration whose corpus and tokenizer exist. The shards, the split, the merge and the manifest
are the library's own, so that step 2 finds nothing to do and step 3 takes the files as any others.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from zerokara.base import manifest
from zerokara.base.durable import atomic_file
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.corpus.find import find_files
from zerokara.steps.tokenize import manifest_work
from zerokara.tokenizer.fast_encoder import without_gigatoken
from zerokara.tokenizer.hugging_face import open_encoder
from zerokara.tokens import work_folder
from zerokara.tokens.encode import EncodedCorpus, Stage, encode_corpus, manifest_facts
from zerokara.tokens.indexed import TokenPaths, bin_path, idx_path, write_index
from zerokara.tokens.shard_tasks import WHOLE, Part
from zerokara.tokens.shards import Job, ShardResult, ShardTask, write_shard

RunTasks = Callable[[Job, Sequence[Iterator[ShardTask]], int], Generator[ShardResult, None, None]]
"""Runs the tasks of all input streams, as `run_in_workers` does."""


def write_documents(prefix: Path, documents: Iterable[NDArray[Any]], dtype: np.dtype[Any]) -> None:
    """Write documents that are in memory already (ids with the end of document) as a pair of token files."""
    lengths = []
    with atomic_file(bin_path(prefix)) as file:
        for ids in documents:
            file.write(np.ascontiguousarray(ids, dtype=dtype).data)
            lengths.append(len(ids))
    with atomic_file(idx_path(prefix)) as file:
        write_index(file, np.array(lengths, dtype=np.int32), dtype, np.arange(len(lengths) + 1))


def run_in_this_process(
    job: Job, input_streams: Sequence[Iterator[ShardTask]], num_workers: int
) -> Generator[ShardResult]:
    """Do the tasks one after another, in the place of `run_in_workers`."""
    for stream in input_streams:
        for task in stream:
            yield write_shard(task, job)


def encode(
    config: PretrainConfig,
    task_bytes: int | None = None,
    run_tasks: RunTasks = run_in_this_process,
    stage: Stage = "all",
    part: Part = WHOLE,
) -> EncodedCorpus:
    """Encode the corpus of `config` with SentencePiece; the work folder stays, and there is no manifest."""
    files = find_files([entry for _, entry in config.entries], config.where("input_jsonl"))
    encoder = open_encoder(config.input_tokenizer_file, config.end_of_document)
    choice = without_gigatoken(encoder, "")
    replaced: dict[str, Any] = {"run_in_workers": run_tasks}
    replaced |= {"usual_task_bytes": lambda *_: task_bytes} if task_bytes else {}
    with mock.patch.multiple("zerokara.tokens.encode", **replaced):
        return encode_corpus(config, files, encoder, choice, stage, part)


def stopping_after(shards: int, run_tasks: RunTasks = run_in_this_process) -> RunTasks:
    """End the run when so many shards are finished, as Ctrl-C does."""

    def stopped(*arguments: Any) -> Any:
        with closing(run_tasks(*arguments)) as results:
            for finished, result in enumerate(results, 1):
                yield result
                if finished == shards:
                    raise KeyboardInterrupt

    return stopped


def written(config: PretrainConfig) -> dict[str, bytes]:
    folder = Path(config.output_prefix).parent
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def discard_work(config: PretrainConfig) -> None:
    """Remove the work folder, as step 2 does once it has written its manifest."""
    work_folder.discard(TokenPaths(config.output_prefix))


def finished(config: PretrainConfig) -> dict[str, bytes]:
    """Remove the work folder; return the files of the result, by name."""
    discard_work(config)
    return written(config)


def write_tokens(config: PretrainConfig) -> TokenPaths:
    """Write the token files of both splits, the quarantine file and the manifest of `config`."""
    paths, encoded = TokenPaths(config.output_prefix), encode(config)
    files = find_files([entry for _, entry in config.entries], config.where("input_jsonl"))
    encoder = open_encoder(config.input_tokenizer_file, config.end_of_document)
    facts = manifest_facts(config, files, encoded, encoder)
    manifest.write(paths.manifest, manifest_work(config, files, encoder), {"tokens": paths.outputs}, facts, 0.0)
    work_folder.discard(paths)
    return paths
