"""The run folder: its files, its locks, and the record of a run that has ended.

Two files are locked (`file_lock`), so that one command and one run at a time work in a folder: ``command.lock`` by the
command that the user typed, from before torch is imported to its end; and ``lock`` by the first training process, which
may outlive a command that was killed, in order to save.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zerokara import checkpoint
from zerokara.base import durable, file_lock, manifest
from zerokara.base.errors import Fault, RunError, UserError
from zerokara.base.progress import count_text, plural, seconds_text
from zerokara.checkpoint.folders import BEST_NAME, EXPORTED_PARTS, IDENTITY_NAME, LATEST_NAME, METRICS_NAME
from zerokara.config.loading import RESOLVED_NAME
from zerokara.config.pretrain_config import TrainingSettings
from zerokara.config.writing import as_yaml
from zerokara.model.shapes import ModelShape
from zerokara.training.planning.earlier_run import PLACES, WITHOUT_EFFECT, EarlierRun, identity_of
from zerokara.training.planning.run_plan import PLAN_NAME, RunPlan

STOP_NAME = "STOP"
"""``touch STOP`` in the run folder asks for a stop, from any machine that sees it."""
LOCK_NAME, COMMAND_LOCK_NAME = LOCK_NAMES = "lock", "command.lock"
LOCK_SECONDS = 60
_OF_COPY = "put a copy of it back, or rename the folder and train from the start"


@contextlib.contextmanager
def training_lock(run_dir: Path) -> Iterator[None]:
    """Lock a run folder for training as long as the block lasts.

    Raises:
        RunError: another process holds it, and did not release it within a minute.
    """
    with contextlib.ExitStack() as stack:
        if not stack.enter_context(file_lock.held(run_dir / LOCK_NAME)):
            print(f"another process is training in {run_dir}; waiting for it to save and exit", flush=True)
            if not stack.enter_context(file_lock.held(run_dir / LOCK_NAME, LOCK_SECONDS)):
                rule = "another process is training here; stop it, or choose another output_model_dir"
                raise RunError(f"{run_dir}: {rule}")
        yield


@contextlib.contextmanager
def command_lock(config: TrainingSettings) -> Iterator[None]:
    """Make `output_model_dir` if it does not exist, and lock it for this command as long as the block lasts.

    Training processes that a killed command left behind, and that are still saving, are waited for. A new folder in
    which nothing was written is removed again.

    Raises:
        UserError: another command is running there; names its process.
        RunError: training processes that a killed command left behind do not end.
    """
    run_dir = Path(config.output_model_dir)
    path = run_dir / COMMAND_LOCK_NAME
    with durable.made_folder(run_dir.resolve()), file_lock.held(path) as is_ours:
        if not is_ours:
            holder = file_lock.read_holder(path)
            stop = f", stop it (kill {holder.pid}: it saves and exits)" if holder and holder.is_here else ""
            stop = stop or (f"; if that machine is gone, delete {path}" if holder else "")
            rule, remedy = f"is in use by {holder or 'another command'}", f"wait for it{stop}, or choose another folder"
            raise UserError(config.fault("output_model_dir", rule, remedy))
        if (run_dir / LOCK_NAME).exists():
            with training_lock(run_dir):
                pass
        (run_dir / STOP_NAME).unlink(missing_ok=True)  # one that is there was meant for an earlier start
        yield


def read_earlier(config: TrainingSettings) -> EarlierRun | None:
    """Read what the run folder holds; None where nothing was saved: a start without a checkpoint binds nobody.

    Raises:
        UserError: it holds foreign files, or files of a run that are damaged.
    """
    run_dir = Path(config.output_model_dir)
    if run_dir.exists() and not (run_dir / IDENTITY_NAME).exists():
        # A start may have been killed while it wrote its first file.
        unfinished = set(run_dir.glob(f"{IDENTITY_NAME}*{durable.PARTIAL_SUFFIX}"))
        if any(path not in unfinished and path.name not in LOCK_NAMES for path in run_dir.iterdir()):
            rule = "must be an empty folder or a run folder; it holds other files"
            raise UserError(config.fault("output_model_dir", rule, "choose another folder"))
    steps, ended = checkpoint.all_steps(run_dir), run_dir / manifest.NAME
    if not (steps or checkpoint.broken_names(run_dir) or ended.exists()):
        return None
    states = (checkpoint.folder_of(run_dir, step) for step in reversed(steps))
    newest = next((folder for folder in states if (folder / checkpoint.STATE_NAME).exists()), None)
    ended_at = manifest.read(ended).facts["steps"] if ended.exists() else None
    last = checkpoint.folder_of(run_dir, max(steps, default=0))
    is_there = checkpoint.step_of(last) >= (ended_at or 0) and checkpoint.check_sizes(last, EXPORTED_PARTS)
    return EarlierRun(
        steps=steps,
        state=checkpoint.read_state(newest) if newest else None,
        identity=durable.read_back(run_dir / IDENTITY_NAME, _OF_COPY),
        plan=durable.read_back(run_dir / PLAN_NAME, _OF_COPY),
        ended_at=ended_at if is_there else None,
    )


def claim(plan: RunPlan, table: Sequence[tuple[str, str]] = ()) -> None:
    """Make the run folder, or take the one of this run, which `read_earlier` has found; `table` is for a reader."""
    run_dir, config = plan.run_dir, plan.requested
    durable.write_json(run_dir / IDENTITY_NAME, identity_of(plan))  # the first file: it tells whose the folder is
    files: dict[str, bytes | str] = {**plan.encoder.run_files, **plan.data.run_files}
    for name, content in files.items():
        (run_dir / name).parent.mkdir(exist_ok=True)
        durable.write_file(run_dir / name, content)
    durable.write_file(run_dir / RESOLVED_NAME, as_yaml(config))
    plan.write(run_dir / PLAN_NAME, table)


def name_aside(run_dir: Path) -> Path:
    """Return the name under which `set_aside` would keep a run."""
    return durable.unused_name(run_dir.resolve() if run_dir.is_symlink() else run_dir, durable.ASIDE_ENDING)


def set_aside(run_dir: Path) -> None:
    """Rename a run that `command_lock` has locked, and make an empty folder in its place.

    Raises:
        UserError: the folder cannot be renamed.
    """
    # If the name is a link, its target is renamed, and the new run is on the same disk.
    folder, old = run_dir.resolve(), name_aside(run_dir)
    try:
        folder.rename(old)
    except OSError as error:
        rule = f"cannot be set aside as {old}: {error.strerror}"
        raise UserError(Fault(str(run_dir), rule, remedy="move it away yourself, or choose another folder")) from error
    folder.mkdir()
    (old / COMMAND_LOCK_NAME).rename(folder / COMMAND_LOCK_NAME)


def find_checkpoint(plan: RunPlan, name: str) -> Path:
    """Find and check a checkpoint: `name` is a folder, or a name or a step in the run folder (``global_step100``,
    ``100``, ``best``), or empty for the newest.

    Raises:
        UserError: there is no such checkpoint, it is broken or of another model, or there is no validation text.
    """
    run_dir = plan.run_dir
    if not plan.data.num_valid_tokens:
        remedy = "raise it, and prepare the data again: step 2 with --redo; step 7 does so itself"
        raise UserError(plan.requested.fault("valid_fraction", "kept nothing for validation", remedy))
    if not name:
        folder = checkpoint.newest_complete(run_dir)
        if folder is None:
            raise UserError(Fault(where=str(run_dir), rule="holds no complete checkpoint", remedy="train first"))
    else:
        marked = run_dir / name  # a file that names a checkpoint
        is_marker = name in (BEST_NAME, LATEST_NAME) and marked.is_file()
        named = marked.read_text(encoding="utf-8").strip() if is_marker else name
        number = int(name) if name.isdecimal() else -1
        candidates = [Path(named), run_dir / named, checkpoint.folder_of(run_dir, number)]
        folder = next((path for path in candidates if path.is_dir()), None)
        if folder is None:
            steps = ", ".join(str(step) for step in checkpoint.all_steps(run_dir)) or "none"
            rule = f"is no checkpoint, neither as a path nor as a name in {run_dir}, which has the steps {steps}"
            raise UserError(Fault(where="--evaluate", rule=rule, value=name))
        checkpoint.check(folder)
    state = checkpoint.read_state(folder)
    other = "tokenizer" if state.tokenizer_sha256 != plan.encoder.sha256 else ""
    shapes = {replace(shape, init_std=0.0) for shape in (ModelShape.from_json(state.shape), plan.shape)}
    if other := "model" if len(shapes) > 1 else other:
        raise UserError(Fault(where=str(folder), rule=f"belongs to another {other} than that of the configuration"))
    return folder


def record(plan: RunPlan, newest: Path) -> manifest.Manifest:
    """Write the manifest of a run that has ended at the checkpoint `newest`."""
    state = checkpoint.read_state(newest)
    facts: dict[str, Any] = {
        **state.facts,
        "steps": state.step,
        "tokens": state.tokens,
        "skipped_steps": state.skipped_steps,
        "epochs": state.samples / plan.schedule.samples_per_epoch,
        "parameters": plan.shape.num_parameters(padded=False),
        "checkpoint": newest.name,
        "num_processes": plan.num_processes,
        "precision": state.precision,
        "sources": [asdict(use) for use in plan.consumption.sources],
    }
    settings = plan.requested.model_dump(mode="json", exclude={*PLACES, *WITHOUT_EFFECT})
    settings |= {**identity_of(plan), "steps": plan.schedule.num_steps}
    spec = manifest.StepSpec("3_train", settings, {"tokenizer": plan.encoder.record})
    outputs = {"metrics": plan.run_dir / METRICS_NAME, "checkpoint": newest / manifest.NAME}
    return manifest.write(plan.run_dir / manifest.NAME, spec, outputs, facts, state.seconds)


def summary_rows(
    record: manifest.Manifest, newest: Path, run_dir: Path, task_rows: Sequence[tuple[str, str]] = ()
) -> list[tuple[str, str]]:
    """Return the rows of a run's summary, for display."""
    facts, seconds = record.facts, record.seconds
    rows = [
        ("trained", f"{count_text(facts['tokens'])} tokens, {facts['epochs']:.3f} epochs, {facts['steps']:,} steps"),
        ("time", f"{seconds_text(seconds)}, {count_text(facts['tokens'] / seconds)} tok/s over all starts"),
    ]
    if "loss" in facts:  # else every step was skipped
        rows.append(("loss", f"{facts['first_loss']:.3f} → {facts['loss']:.3f} nats per token"))
    if facts.get("skipped_steps"):
        rows.append(("skipped", f"{plural(facts['skipped_steps'], 'step')}, which changed nothing"))
    if "valid_bits_per_byte" in facts:
        # There is no first one where the validation has become another during the run.
        values = [facts[name] for name in ("first_valid_bits_per_byte", "valid_bits_per_byte") if name in facts]
        values.append(facts.get("best_valid_bits_per_byte"))
        *course, best = (f"{value:.3f}" if value is not None else "not finite" for value in values)
        at = f"{facts.get('best_valid_step', 0):,}"
        rows.append(("validation", f"{' → '.join(course)} bits per byte, best {best} at step {at}"))
    rows += [("warning", facts["warning"])] if "warning" in facts else []
    rows += [*task_rows, ("checkpoint", str(newest))]
    if checkpoint.is_much_worse(newest):
        rows.append(("", f"step 4 exports {checkpoint.best(run_dir)}: by validation the newest is more than 1 % worse"))
    further = (("plots", run_dir / "plots" / "overview.png"), ("samples", run_dir / "samples.md"))
    return [*rows, *((name, str(path)) for name, path in further if path.exists())]
