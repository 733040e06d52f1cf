"""Checks of each step's outputs, before any work and with ``--dry-run``: they can be written, and belong to no one
else.

A step replaces the outputs of an earlier run of the same step, known by the manifest. Any other file of such a name
belongs to somebody else and stays, with ``--redo`` too. `run_all.sh` has all its steps checked at once.
"""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerokara.base import manifest
from zerokara.base.durable import PARTIAL_SUFFIX
from zerokara.base.errors import Fault, UserError, guarded, refuse
from zerokara.checkpoint.folders import IDENTITY_NAME
from zerokara.config.convert_config import ConvertSettings
from zerokara.config.data import DataSettings
from zerokara.config.engine import ScheduleSettings
from zerokara.config.finetune_config import ExampleSettings
from zerokara.config.loading import FILES, load
from zerokara.config.settings import Settings
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.corpus.find import InputFile
from zerokara.examples.example_files import STEP as EXAMPLES_STEP
from zerokara.examples.example_files import ExamplePaths
from zerokara.tokenizer import LOG_HEADER, LOG_NAME, TOKENIZER_NAMES, WORK_NAME, made_name
from zerokara.tokens.indexed import TokenPaths

TOKENIZER_STEP, TOKENS_STEP = "train_tokenizer", "tokenize"  # in their manifests
_MAX_NAME_BYTES = 235  # a file system's 255, less what `durable` appends to a name while writing
_MARKS = (LOG_HEADER.encode(), b'{"file":')
"""First bytes of our log and quarantine file: a run that failed leaves them without a manifest."""


@dataclass(frozen=True)
class Outputs:
    """The files of a step, the manifest last, and the setting that names their place."""

    key: str
    files: Sequence[Path]
    step: str = ""
    """Name of the step in the manifest. Empty if the subpackage itself knows who wrote the files, and if an earlier run
    of this step was killed before it wrote the manifest."""


def of_tokenizer(config: TokenizerConfig) -> Outputs:
    """Step 1."""
    folder = Path(config.output_dir)
    files = [folder / name for name in (*TOKENIZER_NAMES, LOG_NAME, manifest.NAME)]
    return Outputs("output_dir", files, "" if (folder / WORK_NAME).is_dir() else TOKENIZER_STEP)


def of_tokens(config: DataSettings) -> Outputs:
    """Step 2."""
    paths = TokenPaths(config.output_prefix)
    files = [*paths.splits, paths.work_folder / "plan.json", paths.quarantine, paths.manifest]
    return Outputs("output_prefix", files, "" if any(paths.work_folder.glob("*.json")) else TOKENS_STEP)


def of_examples(config: ExampleSettings) -> Outputs:
    """Step 7, before its run."""
    paths = ExamplePaths(config.output_prefix)
    return Outputs("output_prefix", [*paths.written, paths.manifest], "" if paths.lock.exists() else EXAMPLES_STEP)


def of_run(config: ScheduleSettings) -> Outputs:
    """Steps 3 and 7."""
    return Outputs("output_model_dir", [Path(config.output_model_dir, IDENTITY_NAME)])


def of_export(config: ConvertSettings) -> Outputs:
    """Step 4, which makes a folder beside an existing one and replaces it."""
    folder = Path(config.output_tokenizer_and_model_dir).absolute()  # "." has no name
    beside = folder.with_name(folder.name + PARTIAL_SUFFIX)
    return Outputs("output_tokenizer_and_model_dir", [beside / manifest.NAME, folder / manifest.NAME])


def check(config: Settings, outputs: Outputs, **inputs: Sequence[InputFile]) -> None:
    """Check that a step can write its outputs, and that none of them is among its `inputs`, by setting.

    Raises:
        UserError: names the setting and the files.
    """
    written = [path.stat() for path in outputs.files if os.path.exists(path)]
    found = []
    for key, files in inputs.items():
        local = [file for file in files if file.remote is None]
        both = [file.name for file in local if any(os.path.samestat(file.path.stat(), one) for one in written)]
        if both:
            rule = f"names {', '.join(both[:5])}, which this step writes itself"
            found.append(config.fault(key, rule, "rename or move the input"))
    refuse(found or faults(config, outputs))


def faults(config: Settings, outputs: Outputs) -> list[Fault]:
    """Return why a step cannot write its outputs: the first reason, if there is one."""
    reason = next(filter(None, map(_reason_against, outputs.files)), "")
    others = "" if reason or not outputs.step else _others_in(outputs)
    remedy = f"choose another {outputs.key}{', or move those files away' if others else ''}"
    return [config.fault(outputs.key, f"cannot be written: {reason or others}", remedy)] if reason or others else []


def _others_in(outputs: Outputs) -> str:
    """Return which files of another step, or of somebody else, are in the place of `outputs`; empty if none."""
    record = outputs.files[-1]
    made = manifest.read(record) if record.exists() else None
    if made and made.step != outputs.step:
        return f"{record} is of step {made.step!r}"
    ours = {record.parent / one.path for files in made.outputs.values() for one in files} if made else set()
    others = [path for path in outputs.files[:-1] if path.exists() and not (path in ours or _is_left_by_us(path))]
    names = ", ".join(path.name for path in others)
    return f"{record.parent} holds {names}, which no run of this step wrote" if others else ""


def _reason_against(file: Path) -> str:
    """Return why `file` cannot be written; empty if it can."""
    file = file.absolute()
    if os.path.isdir(file):
        return f"{file} is a folder"
    if long := next((name for name in file.parts if len(os.fsencode(name)) > _MAX_NAME_BYTES), ""):
        return f"the name {long[:30]}… has {len(os.fsencode(long))} bytes; at most {_MAX_NAME_BYTES} are possible"
    folder = next(folder for folder in file.parents if os.path.lexists(folder))
    if not folder.exists():
        return f"{folder} is a broken link"
    try:
        # Permission bits do not bind root; a read-only file system does. The file has no name (O_TMPFILE) if possible.
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{folder}: {error.strerror}"


def _is_left_by_us(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(max(map(len, _MARKS))).startswith(_MARKS)


def check_line(paths: Sequence[str]) -> None:
    """Check the configuration files of steps 1, 2 to 3, and 4 to 6: each step reads what the one before it writes.
    Raises UserError with the faults of all three."""
    found: list[Fault] = []
    loaded: list[Any] = []
    for path, name in zip(paths, ("sentence_piece_config.yaml", "config.yaml", "convert_config.yaml"), strict=True):
        try:
            loaded.append(load(FILES[name], path))
        except UserError as error:
            found += error.faults
    if not found:
        first, second, last = loaded
        made, run = os.path.join(first.output_dir, made_name(first.base_tokenizer)), second.output_model_dir
        if os.path.abspath(second.input_tokenizer_file) != os.path.abspath(made):
            rule = f"is not the tokenizer of step 1, {made} ({first.where('output_dir')})"
            found.append(second.fault("input_tokenizer_file", rule, f"write {made}, or run the steps one by one"))
        checkpoint = os.path.abspath(last.input_model_dir)
        if os.path.abspath(run) not in (checkpoint, os.path.dirname(checkpoint)):
            rule = f"is not the run of step 3, {run} ({second.where('output_model_dir')})"
            found.append(last.fault("input_model_dir", rule, f"write {run}, or run the steps one by one"))
        steps = ((first, of_tokenizer), (second, of_tokens), (second, of_run), (last, of_export))
        found += [fault for config, of in steps for fault in faults(config, of(config))]
    refuse(found)
    print("\n".join(f"{path}: in order" for path in paths))


def main(paths: Sequence[str]) -> int:
    """Do `check_line`; returns the exit code."""
    return guarded(lambda: check_line(paths))
