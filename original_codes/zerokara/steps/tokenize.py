"""Step 2: raw text → token files (.bin/.idx) for training and validation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from zerokara import manifest
from zerokara.config.data import DataSettings
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.corpus.format_check import check_formats
from zerokara.corpus.inputs import InputFile, find_files, for_manifest
from zerokara.progress import bytes_text, count_text, log, opening, plural, summary
from zerokara.steps import command, preflight
from zerokara.tokens import work_folder
from zerokara.tokens.accounts import SourceTally, check_bad_fraction
from zerokara.tokens.cluster import schedulers
from zerokara.tokens.encode import encode_corpus
from zerokara.tokens.layout import TokenPaths, bin_path
from zerokara.tokens.preparation import PreparedEncoding, prepare
from zerokara.tokens.summary import manifest_facts, summary_rows
from zerokara.tokens.tasks import num_workers
from zerokara.tokens.workers import start_fork_server


def tokenize(config: PretrainConfig, options: command.Options) -> None:
    """Tokenize the corpus, unless that is done already; with --dry-run only say what would be done."""
    started, paths = time.monotonic(), TokenPaths(config.output_prefix)
    preflight.check_tokenizer_file(config)
    files = find_files(config.input_jsonl, config.where("input_jsonl"))
    work = manifest_work(config, files)
    if done := manifest.already_done(paths.manifest, work, redo=options.redo):
        check_bad_fraction(config, SourceTally.from_facts(done.facts), paths)
        if not options.dry_run:
            work_folder.discard(paths)  # of a step that was killed after it had written its manifest
        opening(f"step 2 tokenise: done already, {bin_path(paths.train)} was made from the same text (--redo: again)")
        log(f"next: {_next_commands(config, options)}")
        return
    preflight.check(config, preflight.of_tokens(config), input_jsonl=files)
    check_formats(files, config.text_field, config.txt_document, config.where("text_field"))
    scheduler = schedulers.scheduler_of(config)
    if scheduler is None:
        start_fork_server()
    prepared = prepare(config, files)
    _log_plan(config, files, prepared)
    if options.dry_run:
        log("dry run: nothing was written")
        return
    run_tasks = schedulers.run_tasks(config, files, scheduler)
    encoded = encode_corpus(config, files, prepared.encoder, prepared.choice, run_tasks=run_tasks)
    facts = manifest_facts(config, files, encoded, prepared.encoder)
    seconds = time.monotonic() - started
    manifest.write(paths.manifest, work, {"tokens": paths.outputs}, facts, seconds, encoded.hashes)
    work_folder.discard(paths)
    rows = summary_rows(config, encoded, facts, time.monotonic() - started)
    summary("step 2 tokenise: done", rows, _next_commands(config, options))


def manifest_work(config: DataSettings, files: Sequence[InputFile]) -> manifest.StepSpec:
    """The settings and inputs that the token files depend on."""
    settings = {
        "text_field": config.text_field,
        "txt_document": config.txt_document,
        "files_per_source": [sum(file.source == source for file in files) for source in range(len(config.input_jsonl))],
        "valid_fraction": config.valid_fraction,
        "valid_min_documents": config.valid_min_documents,
        "split_seed": config.split_seed,
    }
    inputs: manifest.Paths = {
        "input_tokenizer_file": Path(config.input_tokenizer_file),
        "input_jsonl": for_manifest(files),
    }
    keys = {"files_per_source": "input_jsonl (number of files of each entry)"}
    return manifest.StepSpec(preflight.TOKENS_STEP, settings, inputs, lambda name: keys.get(name, name))


def _log_plan(config: DataSettings, files: Sequence[InputFile], prepared: PreparedEncoding) -> None:
    corpus = f"{plural(len(files), 'file')}, {bytes_text(sum(file.bytes for file in files))}"
    expected = prepared.expected
    tokens = f"about {count_text(expected.tokens)} tokens, {bytes_text(expected.output_bytes)}"
    output = bin_path(TokenPaths(config.output_prefix).train)
    workers = plural(num_workers(config, files), "worker") if config.cluster == "none" else f"on {config.cluster}"
    opening(
        f"step 2 tokenise: {corpus} → {output} ({tokens}), {workers}\n"
        f"  encoder: {prepared.choice.name}, {prepared.choice.reason}"
    )
    for note in prepared.notes:
        log(f"  tokenizer: {note}")


def _next_commands(config: PretrainConfig, options: command.Options) -> str:
    steps = ("count_tokens.py", "3_train_node1.sh")
    return "\nthen: ".join(command.next_command(step, options, config) for step in steps)


main = partial(command.run, "2_tokenize.sh", tokenize, __doc__)
"""Command line of the step; takes its arguments, gives the exit code."""
