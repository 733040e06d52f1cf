"""Step 2: raw text → token files (.bin/.idx) for training and validation."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerokara import hashing, manifest
from zerokara.corpus.heads import check_heads
from zerokara.corpus.inputs import InputFile, find_files, for_manifest
from zerokara.corpus.sizes import total_plain_bytes
from zerokara.errors import shown
from zerokara.progress import bytes_text, count_text, opening, seconds_text, summary
from zerokara.steps import outputs
from zerokara.tokenizer.choice import TokenizerFacts, check_there
from zerokara.tokens.estimate import check_disk_space, sample
from zerokara.tokens.layout import TokenPaths, bin_path, idx_path
from zerokara.tokens.preparation import Forecast, Preparation, Prepared
from zerokara.tokens.tasks import num_workers
from zerokara.tokens.workers import Workers

if TYPE_CHECKING:  # numpy, and the classes of the configuration, are loaded when the workers are at it too
    from zerokara.config.pretrain_config import PretrainConfig
    from zerokara.steps import command
    from zerokara.tokens.encode import Encoded


def tokenize(config: PretrainConfig, options: command.Options, workers: Workers | None = None) -> None:
    """Do step 2, or say that it is done, or what it would do; `workers` may have been started beforehand."""
    started = time.monotonic()
    paths = TokenPaths(config.output_prefix)
    with workers or Workers() as workers:
        made = _tokenize(config, options, paths, workers, started)
    if made is not None:
        facts, rows = made
        summary("step 2 tokenise: done", [*rows, _took(facts, time.monotonic() - started)], _next(config, options))


def _tokenize(
    config: PretrainConfig, options: command.Options, paths: TokenPaths, workers: Workers, started: float
) -> tuple[dict[str, Any], list[tuple[str, str]]] | None:
    """The step itself: what it found, as facts and as rows; None where there was nothing to do."""
    model_path = Path(config.input_tokenizer_file)
    check_there(model_path)
    workers.open(Forecast(model_path))
    files = find_files(config.input_jsonl, config.where("input_jsonl"))
    outputs.check_inputs(config, "input_jsonl", files, outputs.token_files(config))
    workers.number = num_workers(config, files)
    work = _work(config, files)
    done = manifest.already_done(paths.manifest, work, redo=options.redo)
    if done is not None:
        from zerokara.tokens.accounts import SourceTally, check_bad_fraction

        check_bad_fraction(config, SourceTally.from_facts(done.facts), paths)
        opening(f"step 2 tokenise: done already, {bin_path(paths.train)} was made from the same text (--redo: again)")
        print(f"next: {_next(config, options)}")
        if paths.work_folder.is_dir() and not options.dry_run:  # of a step that was killed when it had ended
            from zerokara.tokens.encode import discard_work

            discard_work(config)
        return None
    outputs.check(outputs.of_tokens(config))
    check_heads(files, config.text_field, config.txt_document, config.where("text_field"))
    workers.ask(Preparation(model_path, sample(config, files), total_plain_bytes(files)))
    from zerokara.tokens.encode import discard_work, encode_corpus  # while the encoder is proved

    prepared = workers.answer()
    assert isinstance(prepared, Prepared)
    tokenizer, choice, expected = prepared.tokenizer, prepared.choice, prepared.expected
    check_disk_space(config, files, expected)
    from_what = f"{len(files)} file{'s' if files[1:] else ''}, {bytes_text(sum(file.bytes for file in files))}"
    to_what = f"about {count_text(expected.tokens)} tokens, {bytes_text(expected.output_bytes)}"
    opening(
        f"step 2 tokenise: {from_what} → {bin_path(paths.train)} ({to_what}), {workers.number} workers\n"
        f"  encoder: {choice.name}, {choice.word}"
    )
    for note in prepared.notes:
        print(f"  tokenizer: {note}")
    if options.dry_run:
        print("dry run: nothing was written")
        return None
    with hashing.HashesAhead(work.input_files()) as ahead:
        made = encode_corpus(config, files, tokenizer, choice, workers)
        facts = _facts(config, files, made, tokenizer)
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
    keys = {"files_per_source": "input_jsonl (number of files of each entry)"}
    return manifest.Work(outputs.TOKENS_STEP, settings, inputs, lambda name: keys.get(name, name))


def _outputs(paths: TokenPaths) -> dict[str, Path | list[Path]]:
    there = [path_of(prefix) for prefix in (paths.train, paths.valid) for path_of in (bin_path, idx_path)]
    there.append(paths.quarantine)
    return {"tokens": [path for path in there if path.exists()]}


def _facts(
    config: PretrainConfig, files: Sequence[InputFile], made: Encoded, tokenizer: TokenizerFacts
) -> dict[str, Any]:
    from zerokara.tokens.accounts import total
    from zerokara.tokens.indexed import dtype_for

    tallies = made.sources
    sources = [
        {
            "entry": entry,
            "files": sum(file.source == source for file in files),
            **tally.facts(),
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
    text_bytes = splits["train"]["text_bytes"] + splits["valid"]["text_bytes"]
    return {
        **total(tallies).facts(),
        "documents_written": splits["train"]["documents"] + splits["valid"]["documents"],
        **splits,
        "sources": sources,
        "text_bytes": text_bytes,
        "text_bytes_per_second": round(made.encoded.text_bytes / max(made.seconds, 1e-9)),
        "encoder": made.encoder,
        "resumed_shards": made.resumed_shards,
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "dtype": dtype_for(tokenizer.vocab_size).name,
    }


def _rows(config: PretrainConfig, made: Encoded, facts: dict[str, Any], paths: TokenPaths) -> list[tuple[str, str]]:
    from zerokara.tokens.accounts import damaged_text, reasons_text, total

    rows, whole = [], total(made.sources)
    for entry, tally in zip(config.input_jsonl, made.sources, strict=True):
        unread = tally.bytes_skipped.total() + tally.bytes_lost
        of_bytes = f" ({bytes_text(unread)} of {bytes_text(tally.bytes_in)})" if unread else ""
        skipped = f"{tally.skipped.total():,} skipped{of_bytes}"
        rows.append((shown(entry), f"{tally.documents_in:,} documents in, {skipped}"))
        for name, split in (("  train", tally.train), ("  valid", tally.valid)):
            text = f"{split.documents:,} documents, {split.tokens:,} tokens, {bytes_text(split.text_bytes)} of text"
            rows.append((name, text))
    if whole.skipped:
        rows.append(("skipped", f"{reasons_text(whole.skipped)}; listed in {paths.quarantine}"))
    if whole.damaged:
        number = f"{len(whole.damaged):,} file{'s' if whole.damaged[1:] else ''}"
        rows.append(("damaged", f"{number}: {damaged_text(whole.damaged)}"))
    return rows


def _took(facts: dict[str, Any], seconds: float) -> tuple[str, str]:
    took = seconds_text(seconds)
    if facts["text_bytes_per_second"]:
        took += f"; encoding {bytes_text(facts['text_bytes_per_second'])}/s of text"
    if facts["resumed_shards"]:
        took += f", after {facts['resumed_shards']:,} shards that an earlier run had finished"
    return "took", took


def _next(config: PretrainConfig, options: command.Options) -> str:
    from zerokara.steps import next_command

    steps = (next_command.COUNT_TOKENS, next_command.TRAIN)
    return "\nthen: ".join(next_command.render(step, options, "config.yaml", config) for step in steps)


def main(argv: Sequence[str]) -> int:
    """Command line of step 2; gives the exit code."""
    if not {"-h", "--help"}.isdisjoint(argv):
        return _main(argv, None)
    # Loading takes the workers a quarter of a second, and so it does the classes of the configuration: both at once.
    with Workers() as workers:
        model_path = _likely_tokenizer(argv)
        if model_path is not None:
            workers.open(Forecast(model_path))
        return _main(argv, workers)


def _main(argv: Sequence[str], workers: Workers | None) -> int:
    from zerokara.config.pretrain_config import PretrainConfig
    from zerokara.steps import command

    return command.run(partial(tokenize, workers=workers), argv, PretrainConfig, "config.yaml", __doc__ or "")


def _likely_tokenizer(argv: Sequence[str]) -> Path | None:
    """The tokenizer that the configuration names, at a glance, so that it can be opened while that is checked.

    A wrong guess does no harm: what is opened for nothing is not used.
    """
    key = "input_tokenizer_file"
    words = dict(word.partition("=")[::2] for word in argv if word.startswith(f"{key}="))
    if key in words:
        return Path(words[key])
    options = dict(pairwise(argv)) | dict(word.split("=", 1) for word in argv if "=" in word)
    with suppress(OSError, UnicodeDecodeError):
        with open(options.get("--config", "config.yaml"), encoding="utf-8") as file:
            text = file.read(2**18)  # no configuration is larger (config/plain_yaml.py)
        found = re.search(rf"^{key}:[ \t]*[\"']?([^\"'#\n]+)", text, re.MULTILINE)
        return Path(found[1].strip()) if found else None
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
