"""Step 2: raw text → token files (.bin/.idx) for training and validation."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerokara import manifest
from zerokara.config import PretrainConfig
from zerokara.corpus.inputs import InputFile, find_files, for_manifest
from zerokara.progress import bytes_text, count_text, opening, seconds_text, summary
from zerokara.steps import command
from zerokara.tokens.layout import TokenPaths, bin_path, idx_path
from zerokara.tokens.tasks import num_workers
from zerokara.tokens.workers import Workers

if TYPE_CHECKING:  # the rest is imported when the workers are at it too
    from zerokara.tokenizer.encoder import Encoder
    from zerokara.tokens.encode import Encoded


def tokenize(config: PretrainConfig, options: command.Options) -> None:
    """Do step 2, or say that it is done, or what it would do."""
    started = time.monotonic()
    paths = TokenPaths(config.output_prefix)
    files = find_files(config.input_jsonl, config.place("input_jsonl"))
    # Processes take a quarter of a second to start, and so does the preparation: both at once, where there is work.
    at_once = not options.dry_run and (options.redo or not paths.manifest.exists())
    with Workers(num_workers(config, files)) if at_once else nullcontext() as workers:
        made = _tokenize(config, options, paths, files, workers, started)
    if made is not None:
        facts, rows = made
        summary("step 2 tokenise: done", [*rows, _took(facts, time.monotonic() - started)], _next(options))


def _tokenize(
    config: PretrainConfig,
    options: command.Options,
    paths: TokenPaths,
    files: Sequence[InputFile],
    workers: Workers | None,
    started: float,
) -> tuple[dict[str, Any], list[tuple[str, str]]] | None:
    """The step itself: what it found, as facts and as rows; None where there was nothing to do."""
    from zerokara.corpus.heads import check_heads
    from zerokara.corpus.sizes import total_plain_bytes
    from zerokara.tokenizer import stand_in
    from zerokara.tokenizer.encoder import Encoder
    from zerokara.tokens.encode import check_bad_fraction, discard_work, encode_corpus
    from zerokara.tokens.estimate import check_disk_space, estimate, sample

    encoder = Encoder(config.input_tokenizer_file)
    if workers is not None:
        workers.open(stand_in.likely(encoder))
    work = _work(config, files)
    done = manifest.already_done(paths.manifest, work, redo=options.redo)
    if done is not None:
        documents, skipped = done.facts["documents_written"], Counter(done.facts["skipped"])
        check_bad_fraction(config, documents, skipped, paths)
        opening(f"step 2 tokenise: done already, {bin_path(paths.train)} was made from the same text (--redo: again)")
        print(f"next: {_next(options)}")
        return None
    check_heads(files, config.text_field, config.txt_document, config.place("text_field"))
    places, size = sample(config, files), total_plain_bytes(files)
    turns = zip_longest(*(place.texts for place in places))
    choice = stand_in.choose(encoder, (text for turn in turns for text in turn if text is not None), size)
    expected = estimate(size, places, choice.encoder)
    check_disk_space(config, expected)
    from_what = f"{len(files)} file{'s' if files[1:] else ''}, {bytes_text(sum(file.bytes for file in files))}"
    to_what = f"about {count_text(expected.tokens)} tokens, {bytes_text(expected.output_bytes)}"
    opening(
        f"step 2 tokenise: {from_what} → {bin_path(paths.train)} ({to_what}), {num_workers(config, files)} workers\n"
        f"  encoder: {choice.name}, {choice.word}"
    )
    if options.dry_run:
        print("dry run: nothing was written")
        return None
    with manifest.HashesAhead(work) as ahead:
        made = encode_corpus(config, files, encoder, choice, workers, anew=options.redo)
        facts = _facts(config, files, made, encoder)
        manifest.finish(paths.manifest, work, _outputs(paths), facts, time.monotonic() - started, ahead=ahead)
    discard_work(config)
    return facts, _rows(config, made, facts, paths)


def _work(config: PretrainConfig, files: Sequence[InputFile]) -> manifest.Work:
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
    return manifest.Work("tokenize", settings, inputs)


def _outputs(paths: TokenPaths) -> dict[str, Path | list[Path]]:
    there = [path_of(prefix) for prefix in (paths.train, paths.valid) for path_of in (bin_path, idx_path)]
    there.append(paths.quarantine)
    return {"tokens": [path for path in there if path.exists()]}


def _facts(config: PretrainConfig, files: Sequence[InputFile], made: Encoded, encoder: Encoder) -> dict[str, Any]:
    from zerokara.tokens.indexed import dtype_for

    tallies = made.sources
    sources = [
        {
            "entry": entry,
            "files": sum(file.source == source for file in files),
            "file_bytes": sum(file.bytes for file in files if file.source == source),
            "documents_in": tally.documents_in,
            "skipped": dict(tally.skipped),
            "train": asdict(tally.train),
            "valid": asdict(tally.valid),
        }
        for source, (entry, tally) in enumerate(zip(config.input_jsonl, tallies, strict=True))
    ]
    splits = {
        split: {
            name: sum(getattr(getattr(tally, split), name) for tally in tallies)
            for name in ("documents", "tokens", "text_bytes")
        }
        for split in ("train", "valid")
    }
    skipped: Counter[str] = sum((tally.skipped for tally in tallies), Counter())
    text_bytes = splits["train"]["text_bytes"] + splits["valid"]["text_bytes"]
    return {
        "documents_in": sum(tally.documents_in for tally in tallies),
        "documents_written": splits["train"]["documents"] + splits["valid"]["documents"],
        "skipped": dict(skipped.most_common()),
        **splits,
        "sources": sources,
        "text_bytes": text_bytes,
        "text_bytes_per_second": round(made.encoded.text_bytes / max(made.seconds, 1e-9)),
        "encoder": made.encoder,
        "resumed_shards": made.resumed_shards,
        "tokenizer_sha256": encoder.sha256,
        "vocab_size": encoder.vocab_size,
        "eos_id": encoder.eos_id,
        "dtype": dtype_for(encoder.vocab_size).name,
    }


def _rows(config: PretrainConfig, made: Encoded, facts: dict[str, Any], paths: TokenPaths) -> list[tuple[str, str]]:
    from zerokara.tokens.encode import reasons_text

    rows = []
    for entry, tally in zip(config.input_jsonl, made.sources, strict=True):
        rows.append((entry, f"{tally.documents_in:,} documents in, {tally.skipped.total():,} skipped"))
        for name, split in (("  train", tally.train), ("  valid", tally.valid)):
            text = f"{split.documents:,} documents, {split.tokens:,} tokens, {bytes_text(split.text_bytes)} of text"
            rows.append((name, text))
    if facts["skipped"]:
        rows.append(("skipped", f"{reasons_text(Counter(facts['skipped']))}; listed in {paths.quarantine}"))
    return rows


def _took(facts: dict[str, Any], seconds: float) -> tuple[str, str]:
    took = f"{seconds_text(seconds)}; encoding {bytes_text(facts['text_bytes_per_second'])}/s of text"
    if facts["resumed_shards"]:
        took += f", after {facts['resumed_shards']:,} shards that an earlier run had finished"
    return "took", took


def _next(options: command.Options) -> str:
    named = options.for_next("config.yaml", "config.yaml")
    return f"python count_tokens.py{named}, then bash 3_train_node1.sh{named}"


def main(argv: Sequence[str]) -> int:
    """Command line of step 2; gives the exit code."""
    return command.run(tokenize, argv, PretrainConfig, "config.yaml", __doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
