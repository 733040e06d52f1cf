"""Step 1: raw text → a SentencePiece tokenizer, with a report on how good it is."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerokara import manifest
from zerokara.config import TokenizerConfig
from zerokara.corpus.format_check import check_formats
from zerokara.corpus.inputs import InputFile, check_unchanged, find_files, for_manifest
from zerokara.durable import made_folder, sync_folder, write_bytes, write_json, write_text
from zerokara.errors import UserError
from zerokara.progress import bytes_text, opening, seconds_text, summary
from zerokara.steps import command, next_command, outputs

if TYPE_CHECKING:
    from zerokara.tokenizer.memory import Plan
    from zerokara.tokenizer.morphemes import Analyser
    from zerokara.tokenizer.report import Report
    from zerokara.tokenizer.sampling import SampleReport
    from zerokara.tokenizer.training import Trained

DEFAULT_CONFIG = "sentence_piece_config.yaml"


def train_tokenizer(config: TokenizerConfig, options: command.Options) -> None:
    """Do step 1, or say that it is done, or what it would do."""
    # SentencePiece: only where the configuration is right.
    from zerokara.tokenizer import memory, report, training
    from zerokara.tokenizer.morphemes import analyser_of

    training.check(config)
    files = find_files(config.input, config.fault("input", "").where)
    outputs.check_inputs(config, "input", files, outputs.tokenizer_files(config))
    for path in config.compare_with:
        report.open_model(path)
    folder = Path(config.output_dir)
    model_path, manifest_path = folder / "tokenizer.model", folder / "manifest.json"
    work = _work(config, files)
    if manifest.already_done(manifest_path, work, redo=options.redo) is not None:
        opening(f"step 1 tokenizer: {model_path} is there already, made from the same text; --redo makes it again")
        print(f"next: {_next(config, options)}")
        return
    outputs.check(outputs.of_tokenizer(config))
    analyser = analyser_of(config)
    check_formats(files, config.text_field, config.txt_document, config.fault("text_field", "").where)
    plan = memory.plan(config, files)
    size = bytes_text(sum(file.bytes for file in files))
    opening(
        f"step 1 tokenizer: {len(files)} file{'s' if files[1:] else ''}, {size} → "
        f"{model_path}, {config.model_type}, {config.vocab_size:,} pieces\n"
        f"  at most {bytes_text(plan.sample_bytes)} of text, {training.num_threads(config)} threads, "
        f"about {bytes_text(plan.peak_bytes)} of memory ({bytes_text(plan.available_bytes)} free)"
        + (f"\n  cut between morphemes as {_packages(analyser)} find them" if analyser else "")
    )
    memory.check(config, files, plan)
    if options.dry_run:
        print("dry run: nothing was written")
        return
    started = time.monotonic()
    with made_folder(folder):
        sample, trained, measured = _make(config, files, plan, analyser, folder)
    facts = {
        "vocab_size": measured.vocab_size,
        "sample": sample.as_json(),
        "sample_bytes": plan.sample_bytes,
        "num_threads": trained.num_threads,
        "estimated_memory_bytes": plan.peak_bytes,
        "peak_memory_bytes": trained.peak_memory_bytes,
        "analyser": analyser.versions() if analyser else {},
    }
    seconds = time.monotonic() - started
    _let_appear(folder, work, facts, seconds)
    rows = [
        ("text offered", f"{bytes_text(sample.bytes_offered)}, {sample.documents:,} documents"),
        ("trained on", _used(sample)),
        *measured.rows(),
        ("pieces not used", f"{len(measured.unused_pieces):,} in {bytes_text(measured.usage_bytes)} of this text"),
        ("took", seconds_text(seconds)),
        ("memory", f"{bytes_text(trained.peak_memory_bytes)} at the peak, estimated {bytes_text(plan.peak_bytes)}"),
        ("report", str(folder / "report.html")),
    ]
    summary(f"step 1 tokenizer: done, {measured.vocab_size:,} pieces in {model_path}", rows, _next(config, options))


def _packages(analyser: Analyser) -> str:
    return " and ".join(f"{name} {version}" for name, version in analyser.versions().items())


def _next(config: TokenizerConfig, options: command.Options) -> str:
    made = {"input_tokenizer_file": str(Path(config.output_dir) / "tokenizer.model")}
    return next_command.render(next_command.TOKENIZE, options, DEFAULT_CONFIG, config, made)


def _make(
    config: TokenizerConfig, files: Sequence[InputFile], plan: Plan, analyser: Analyser | None, folder: Path
) -> tuple[SampleReport, Trained, Report]:
    """Sample, train and measure in the work folder, and leave there what is to appear.

    Where something fails the work folder is gone afterwards; a refusal leaves nothing, and what failed while running
    the log.
    """
    from zerokara.tokenizer import report, sampling, segmentation, training

    work_dir, log_path = folder / outputs.WORK_NAME, folder / outputs.LOG_NAME
    _empty(work_dir)
    had_log = log_path.exists()
    try:
        sample = sampling.draw(
            files,
            work_dir / "sentences.txt",
            sample_bytes=plan.sample_bytes,
            seed=config.seed,
            text_field=config.text_field,
            txt_document=config.txt_document,
            max_bad_fraction=config.max_bad_fraction,
            where=config.fault("input", "").where,
        )
        check_unchanged(files)
        morphemes = work_dir / "morphemes.txt" if analyser else None
        if analyser and morphemes:
            segmentation.segment(config, analyser, sample.sentences, morphemes, training.num_threads(config))
        write_text(log_path, outputs.LOG_HEADER)
        trained = training.train(config, sample.sentences, work_dir, log_path, morphemes)
        model_path = work_dir / "tokenizer.model"
        model_path.write_bytes(trained.model)
        memory = {"estimated_memory_bytes": plan.peak_bytes, "peak_memory_bytes": trained.peak_memory_bytes}
        facts = sample.report.as_json() | memory
        measured = report.make(model_path, config.input, sample.sources, sample.sentences, facts, config.compare_with)
        _write_outputs(work_dir, trained.model, measured)
    except BaseException as error:
        if isinstance(error, UserError) and not had_log:
            log_path.unlink(missing_ok=True)
        _empty(work_dir)
        if (folder / "manifest.json").exists() or not (folder / outputs.TOKENIZER_NAMES[0]).exists():
            shutil.rmtree(
                work_dir, ignore_errors=True
            )  # else it tells that what a killed run left without a manifest is ours
        raise
    return sample.report, trained, measured


def _work(config: TokenizerConfig, files: Sequence[InputFile]) -> manifest.StepSpec:
    from zerokara.tokenizer.report_tokenizers import find_file

    left_out = {"input", "output_dir", "compare_with"}
    settings: dict[str, Any] = {key: value for key, value in config.model_dump().items() if key not in left_out}
    settings["files_per_source"] = [sum(file.source == i for file in files) for i in range(len(config.input))]
    inputs: dict[str, manifest.Inputs] = {"input": for_manifest(files)}
    if config.compare_with:
        inputs["compare_with"] = [find_file(name) for name in config.compare_with]
    keys = {"files_per_source": "input (number of files of each entry)"}
    return manifest.StepSpec(outputs.TOKENIZER_STEP, settings, inputs, lambda name: keys.get(name, name))


def _write_outputs(folder: Path, model: bytes, measured: Report) -> None:
    from zerokara.tokenizer import report_page
    from zerokara.tokenizer.model_file import ModelFile

    write_bytes(folder / "tokenizer.model", model)
    write_text(folder / "tokenizer.vocab", ModelFile(model).vocabulary_text())
    write_json(folder / "report.json", measured.as_json())
    write_text(folder / "report.txt", measured.as_text())
    write_text(folder / "report.html", report_page.page(measured))


def _empty(folder: Path) -> None:
    """Make a folder, or empty the one that is there."""
    folder.mkdir(exist_ok=True)
    for left in folder.iterdir():
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink()


def _let_appear(folder: Path, work: manifest.StepSpec, facts: dict[str, Any], seconds: float) -> None:
    """Give the files their names and write the manifest; the work folder, which tells that they are ours, goes last."""
    (folder / "manifest.json").unlink(missing_ok=True)  # what stands there is no longer true from here on
    for name in outputs.TOKENIZER_NAMES:
        os.replace(folder / outputs.WORK_NAME / name, folder / name)
    sync_folder(folder)
    made: dict[str, Path | list[Path]] = {"tokenizer": [folder / name for name in outputs.TOKENIZER_NAMES]}
    manifest.write(folder / "manifest.json", work, made, facts, seconds)
    shutil.rmtree(folder / outputs.WORK_NAME, ignore_errors=True)


def _used(sample: SampleReport) -> str:
    share = sample.bytes_used / max(sample.bytes_chosen, 1)
    text = f"{bytes_text(sample.bytes_used)} ({share:.3%} of what was chosen), {sample.sentences:,} sentences"
    text += "".join(f"; {count:,} bytes dropped: {reason}" for reason, count in sample.dropped_bytes.items())
    return text + "".join(f"; {count:,} lines skipped: {reason}" for reason, count in sample.bad_lines.items())


def main(argv: Sequence[str]) -> int:
    """Command line of step 1; gives the exit code."""
    return command.run(train_tokenizer, argv, TokenizerConfig, DEFAULT_CONFIG, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
