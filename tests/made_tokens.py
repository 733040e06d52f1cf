"""Token files and their manifest as step 2 leaves them, written in this process: no worker processes, no command line.

`write_tokens` takes a configuration whose corpus and tokenizer exist; `write_documents_as_corpus` makes the corpus from
texts. The shards, the split, the merge, and the manifest are the library's own, so that step 2 finds nothing to do
and step 3 takes the files as any others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from zerokara import manifest
from zerokara.config import PretrainConfig
from zerokara.corpus.inputs import find_files
from zerokara.corpus.reading import OpenStreams
from zerokara.steps import tokenize
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.encode import discard_work, encode_corpus
from zerokara.tokens.layout import TokenPaths
from zerokara.tokens.shards import Job, ShardResult, Tally, write_shard
from zerokara.tokens.tasks import TaskQueue


def write_documents_as_corpus(path: Path, texts: Sequence[str]) -> Path:
    """Write a JSON line for each text; return the path."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def write_tokens(config: PretrainConfig) -> TokenPaths:
    """Write the token files of both splits, the quarantine file and the manifest of `config`."""
    paths, encoder = TokenPaths(config.output_prefix), Encoder(config.input_tokenizer_file)
    files = find_files(config.input_jsonl, config.place("input_jsonl"))
    made = encode_corpus(config, files, encoder, workers=SameProcess(), log=lambda message: None)  # type: ignore[arg-type]
    facts = tokenize._facts(config, files, made, encoder)
    manifest.finish(paths.manifest, tokenize._work(config, files), tokenize._outputs(paths), facts, 0.0)
    discard_work(config)
    return paths


class SameProcess:
    """Takes the place of `Workers`: does the tasks one after another, here."""

    number = 1

    def __enter__(self) -> SameProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def run(self, job: Job, queue: TaskQueue) -> Iterator[Tally | ShardResult]:
        """Yield a tally and a result for each task."""
        encoder = job.open_encoder()
        with OpenStreams() as streams:
            while task := queue.next(0):
                tallies: list[Tally] = []
                result = write_shard(job, task, encoder, tallies.append, streams)
                queue.finished(task, result.at_end)
                yield from tallies
                yield result
