"""Step 1: raw text → a tokenizer, with a report on how good it is."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from zerokara.base import file_lock, manifest
from zerokara.base.errors import UserError
from zerokara.base.progress import bytes_text, log, plural, seconds_text, summary
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.corpus.find import check_unchanged, find_files, for_manifest, note_tests
from zerokara.corpus.format_check import check_formats
from zerokara.steps import command, preflight
from zerokara.tokenizer import made_name


def train_tokenizer(config: TokenizerConfig, options: command.Options) -> None:
    """Do step 1, or say that it is done, or what it would do."""
    # SentencePiece and numpy are loaded only where the configuration is right.
    from zerokara.tokenizer import byte_level, sampling, training
    from zerokara.tokenizer.morphemes import analyser_of

    files = find_files(config.input, config.where("input"))
    note_tests(files)
    others = _tokenizers(config, "compare_with", config.compare_with)
    folder = Path(config.output_dir)
    model_path, manifest_path = folder / made_name(config.base_tokenizer), folder / manifest.NAME
    settings = config.model_dump(exclude={"input", "output_dir", "compare_with", "base_tokenizer"})
    counts = Counter(file.source for file in files)
    settings["input (number of files of each entry)"] = [counts[number] for number in range(len(config.input))]
    inputs: dict[str, manifest.Inputs] = {"input": for_manifest(files), **({"compare_with": others} if others else {})}
    if config.base_tokenizer:
        inputs["base_tokenizer"] = _tokenizers(config, "base_tokenizer", [config.base_tokenizer])
    work = manifest.StepSpec(preflight.TOKENIZER_STEP, settings, inputs)
    following = _next(config, options)
    if manifest.already_done(manifest_path, work, redo=options.redo) is not None:
        log(f"step 1 tokenizer: done already, {model_path} was made from the same text (--redo: again)")
        print(f"next: {following}")
        return
    preflight.check(config, preflight.of_tokenizer(config), input=files)
    planned = f"{config.model_type}, {config.vocab_size:,} pieces"
    if config.base_tokenizer:
        base = byte_level.open_base(config).model_path
        size = f"{config.extend:,} pieces more than" if config.extend else f"{config.vocab_size:,} pieces like"
        planned = f"byte-level BPE, {size} {base}"
    analyser = analyser_of(config)
    corpus = f"{plural(len(files), 'file')}, {bytes_text(sum(file.bytes for file in files))}"
    log(f"step 1 tokenizer: {corpus} → {model_path}, {planned}")
    check_formats(files, config.text_field, config.txt_document, config.where("text_field"))
    budget = sampling.plan(config, files)
    expected, free = bytes_text(budget.peak_bytes), bytes_text(budget.available_bytes)
    sample, threads = bytes_text(budget.sample_bytes), plural(training.num_threads(config), "thread")
    print(f"  at most {sample} of text, {threads}, at most {expected} of memory ({free} free)")
    if analyser:
        packages = " with ".join(f"{name} {version}" for name, version in analyser.versions().items())
        print(f"  split into the morphemes that {packages} finds")
    if options.dry_run:
        print("dry run: nothing was written")
        return
    started = time.monotonic()
    with file_lock.claimed(folder / "tokenizer.lock", folder):
        drawn, peak, report = training.build(config, files, budget, analyser, folder)
        facts = {
            "vocab_size": report.vocab_size,
            "sample": asdict(drawn),
            "sample_bytes": budget.sample_bytes,
            "num_threads": training.num_threads(config),
            "estimated_memory_bytes": budget.peak_bytes,
            "peak_memory_bytes": peak,
            "analyser": analyser.versions() if analyser else {},
            "left_out": files.left_out,
        }
        made: manifest.Paths = {"tokenizer": training.move_into_place(folder)}
        seconds = time.monotonic() - started
        manifest.write(manifest_path, work, made, facts, seconds, check=partial(check_unchanged, files))
        training.discard_work(folder)
    rows = [
        ("text offered", f"{bytes_text(drawn.bytes_offered)}, {plural(drawn.documents, 'document')}"),
        ("trained on", drawn.use_text()),
        *report.rows(),
        ("pieces not used", f"{len(report.unused_pieces):,} in {bytes_text(report.usage_bytes)} of this text"),
        ("memory", f"{bytes_text(peak)} at the peak, {expected} expected at most"),
        ("took", seconds_text(seconds)),
        ("report", str(folder / "report.html")),
    ]
    summary(f"step 1 tokenizer: done, {report.vocab_size:,} pieces in {model_path}", rows, following)


def _tokenizers(config: TokenizerConfig, key: str, names: Sequence[str]) -> list[Path]:
    """Return the tokenizers that a setting names, all of which can be opened."""
    from zerokara.tokenizer.hugging_face import open_file, tokenizer_file

    try:
        return [open_file(tokenizer_file(Path(name))).model_path for name in names]
    except UserError as error:
        found = [config.fault(key, f"{each.where}: {each.rule}", each.remedy) for each in error.faults]
        raise UserError(found) from error


def _next(config: TokenizerConfig, options: command.Options) -> str:
    """The command that comes after this step: its tokenizer on its text."""
    made = {"input_tokenizer_file": str(Path(config.output_dir, made_name(config.base_tokenizer)))}
    text = {"input_jsonl": config.input, "text_field": config.text_field, "txt_document": config.txt_document}
    return command.next_command("2_tokenize.sh", options, config, made, text)


main = partial(command.run, "1_train_sentencepiece_tokenizer.py", train_tokenizer, __doc__)
