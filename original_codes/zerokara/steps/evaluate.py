"""Step 8: Hugging Face models, measured side by side on the same data, with intervals (`8_evaluate.py`).

Results are a table on the screen, results.json and report.html. What was measured stays in the cache of the output
folder, by content: a stopped run continues, and a further model costs only its own time.
"""

import time
from collections.abc import Sequence
from functools import partial
from itertools import chain, groupby
from os.path import normpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerokara.base import file_lock, manifest
from zerokara.base.durable import write_file, write_json
from zerokara.base.errors import refuse
from zerokara.base.progress import bytes_text, log, plural, seconds_text, summary
from zerokara.config.evaluate_config import EvaluateConfig
from zerokara.corpus.find import check_unchanged, find_files, for_manifest
from zerokara.evaluation import inputs
from zerokara.evaluation.results import Section, add_to_card, page, table
from zerokara.evaluation.scoring import LEVEL
from zerokara.evaluation.tasks import measure_tasks
from zerokara.publishing import exported_folder
from zerokara.steps import command, preflight

if TYPE_CHECKING:
    from zerokara.evaluation.models import LoadedModel

_PLACES: dict[str, Any] = {
    **dict.fromkeys(("models", "output_dir", "texts", "pretraining_data", "device", "batch_tokens"), True),
    "tasks": {"__all__": {"test_data", "train_data"}},
}
"""Settings that name inputs and outputs, or change no result."""
CACHES = "bits_per_byte", "answers"
REDO_HELP = "replace the results of an earlier run (what was measured stays in the cache, by content)"


def evaluate(config: EvaluateConfig, options: command.Options) -> None:
    """Do step 8, or say that it is done, or what it would do."""
    started = time.monotonic()
    folder = Path(config.output_dir)
    names = ("results.json", "report.html", manifest.NAME)
    results_path, page_path, manifest_path = written = [folder / name for name in names]
    outputs = [*written, folder / "cache"]
    files = find_files(config.texts, config.where("texts"), outputs=outputs) if config.texts else []
    task_files = inputs.find_task_files(config)
    faults = [fault for name in config.models if (fault := inputs.check_folder(Path(name)))]
    if not config.texts and not config.tasks:
        remedy = "name held-out text, e.g. data/held_out.jsonl, or tasks"
        faults.append(config.fault("texts", "is empty, as is tasks: there is nothing to measure", remedy))
    refuse(faults)
    weights = [file for name in config.models for file in inputs.model_files(Path(name))]
    sources: dict[str, manifest.Inputs] = {"models": weights}
    for source, members in groupby(files, key=lambda file: file.source):
        sources[f"texts[{source}]"] = for_manifest(list(members))
    for number, (test, train) in enumerate(task_files):
        sources[f"tasks[{number}].test_data"] = for_manifest(test)
        sources[f"tasks[{number}].train_data"] = for_manifest(train)
    if config.pretraining_data:
        corpus = find_files(config.pretraining_data, config.where("pretraining_data"))
        sources["pretraining_data"] = for_manifest(corpus)
    work = manifest.StepSpec("evaluate", config.model_dump(mode="json", exclude=_PLACES), sources)
    done = manifest.already_done(manifest_path, work, redo=options.redo)
    if done is not None:
        log(f"step 8 evaluate: done already, {folder} (--redo: again)")
        print("\n".join(done.facts["table"]))
        return
    # A run that ended before its manifest leaves no other sign.
    has_measured = not manifest_path.exists() and any((folder / "cache" / each).is_dir() for each in CACHES)
    preflight.check(config, preflight.Outputs("output_dir", written, "" if has_measured else work.step), texts=files)
    for name in config.add_to_card:  # what is wrong with a card is told before the work
        exported_folder.read_card(Path(name))
    size = bytes_text(sum(file.bytes for file in files))
    on = f"{plural(len(files), 'file')} ({size}) and {plural(len(task_files), 'task')}"
    log(f"step 8 evaluate: {plural(len(config.models), 'model')} on {on} → {folder}")
    read = list(inputs.read_texts(config, files, config.seed))
    tasks = [inputs.read_task(config, number, each, config.seed) for number, each in enumerate(task_files)]
    if options.dry_run:
        print("dry run: nothing was written")
        return
    with file_lock.claimed(folder / "evaluate.lock", folder):
        models, sections = _measured(config, read, tasks, folder / "cache")
        named = [{"name": model.name, "type": model.config.model_type, "sha256": model.content} for model in models]
        results = {"models": named, "interval_level": LEVEL, "sections": [section.as_json() for section in sections]}
        write_json(results_path, results)
        write_file(page_path, page(sections))
        rows = [("results", str(results_path)), ("page", str(page_path))]
        described = [model for model in models if normpath(model.folder) in map(normpath, config.add_to_card)]
        cards = [add_to_card(model.folder, model.name, sections) for model in described]
        facts = {"table": [line for section in sections for line in table(section)]}
        hashes = {key: value for model in models for key, value in model.hashes.items()}
        seconds = time.monotonic() - started
        # A card that step 4 writes anew lacks the results.
        made: manifest.Paths = {"results": written[:2], "cards": cards}
        check = partial(check_unchanged, [*files, *chain(*chain(*task_files))])
        manifest.write(manifest_path, work, made, facts, seconds, hashes, check=check)
    rows += [*(("model card", str(path)) for path in cards), ("time", seconds_text(seconds))]
    summary("step 8 evaluate: done", rows)


def _measured(
    config: EvaluateConfig, texts: Sequence[inputs.MeasuredText], tasks: Sequence[inputs.TaskData], cache: Path
) -> "tuple[Sequence[LoadedModel], list[Section]]":
    """Measure all models on all data; show each table as soon as it is known."""
    overlaps = inputs.overlaps(config, tasks)
    # This is the border: the configuration has been checked, and torch and transformers are imported.
    from zerokara.evaluation import bits_per_byte
    from zerokara.evaluation.models import open_models

    models = open_models([Path(name) for name in config.models], config.device, config.precision)
    of_texts = bits_per_byte.measure_texts(texts, models, config, cache / CACHES[0])
    with_overlaps = zip(tasks, overlaps, strict=True)
    of_tasks = measure_tasks(with_overlaps, models, seed=config.seed, cache=cache / CACHES[1])
    sections = []
    for section in chain(of_texts, of_tasks):
        log("\n".join(table(section)))
        sections.append(section)
    return models, sections


main = partial(command.run, "8_evaluate.py", evaluate, __doc__, redo=REDO_HELP)
