"""The work of step 1: sample the corpus, train on the sample, measure the result.

Everything is made in a work folder inside the output folder, and moved to its names at the end.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from zerokara import tokenizer as names
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.corpus.find import InputFile, check_unchanged
from zerokara.durable import sync_folder, write_file, write_json
from zerokara.errors import UserError
from zerokara.tokenizer import report, report_page, sampling, training
from zerokara.tokenizer.memory import SampleBudget
from zerokara.tokenizer.model_file import ModelFile
from zerokara.tokenizer.morphemes import Analyser, segment


def build(
    config: TokenizerConfig, files: Sequence[InputFile], budget: SampleBudget, analyser: Analyser | None, folder: Path
) -> tuple[sampling.SampleReport, int, report.Report]:
    """Make the files of a tokenizer in the work folder of `folder`; return the training's peak memory and the reports.

    When it fails, the work folder goes; a refusal leaves nothing, a failure of the training leaves the log.

    Raises:
        UserError: no text, too many unreadable documents, a vocabulary that does not fit the text.
        RunError: the trainer or the analyser failed, or the corpus changed meanwhile.
    """
    work_dir, log_path = folder / names.WORK_NAME, folder / names.LOG_NAME
    _empty(work_dir)
    had_log = log_path.exists()
    try:
        sentences, model_path = work_dir / "sentences.txt", work_dir / names.MODEL_NAME
        sources, sample = sampling.draw(config, files, sentences, budget.sample_bytes)
        check_unchanged(files)
        morphemes = work_dir / "morphemes.txt" if analyser else None
        if analyser and morphemes:
            segment(config, analyser, sentences, morphemes, training.num_threads(config))
        write_file(log_path, names.LOG_HEADER)
        model, peak = training.train(config, sentences, work_dir, log_path, morphemes)
        write_file(model_path, model)
        write_file(work_dir / names.VOCABULARY_NAME, ModelFile(model).vocabulary_text())
        facts = asdict(sample) | {"estimated_memory_bytes": budget.peak_bytes, "peak_memory_bytes": peak}
        measured = report.make(model_path, config.input, sources, sentences, facts, config.compare_with, analyser)
        write_json(work_dir / "report.json", measured.as_json())
        write_file(work_dir / "report.txt", report_page.text(measured))
        write_file(work_dir / "report.html", report_page.page(measured))
        return sample, peak, measured
    except BaseException as error:
        if isinstance(error, UserError) and not had_log:
            log_path.unlink(missing_ok=True)
        _empty(work_dir)
        # A model without a manifest is what a killed run left: there the folder stays, as the sign that it is ours.
        if (folder / "manifest.json").exists() or not (folder / names.MODEL_NAME).exists():
            discard_work(folder)
        raise


def move_into_place(folder: Path) -> list[Path]:
    """Give the files of the work folder their names in `folder`, where no manifest stands until it is written again."""
    (folder / "manifest.json").unlink(missing_ok=True)
    for name in names.TOKENIZER_NAMES:
        os.replace(folder / names.WORK_NAME / name, folder / name)
    sync_folder(folder)
    return [folder / name for name in names.TOKENIZER_NAMES]


def discard_work(folder: Path) -> None:
    """Remove the work folder, once the manifest is written."""
    shutil.rmtree(folder / names.WORK_NAME, ignore_errors=True)


def _empty(folder: Path) -> None:
    """Make a folder, or empty the one that is there."""
    folder.mkdir(exist_ok=True)
    for left in folder.iterdir():
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink()
