"""The outputs of each step and whether they can be written, checked at its start and by ``--dry-run`` before any work.

A step replaces the outputs of an earlier run of the same step, which it knows by the manifest. Any other file of such a
name belongs to somebody else and stays, without ``--redo`` and with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from zerokara import manifest
from zerokara.checkpoint.folders import IDENTITY_NAME
from zerokara.config.convert_config import ConvertConfig, ConvertSettings
from zerokara.config.data import DataSettings
from zerokara.config.optim import ScheduleSettings
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.settings import Settings
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.corpus.inputs import InputFile
from zerokara.errors import Fault, UserError
from zerokara.huggingface.exported_folder import UPLOAD_RECORD_NAME
from zerokara.tokenizer.layout import LOG_HEADER, LOG_NAME, TOKENIZER_NAMES, WORK_NAME
from zerokara.tokens.layout import TokenPaths, bin_path, idx_path
from zerokara.writable import reason_against_entry, reason_against_file, reason_against_folder

if TYPE_CHECKING:  # a large class, which other steps need not wait for
    from zerokara.config.evaluate_config import EvaluateConfig

TOKENIZER_STEP, TOKENS_STEP, EVALUATION_STEP = "train_tokenizer", "tokenize", "evaluate"
"""Names of the steps in their manifests."""
EVALUATION_NAMES = ("results.json", "report.html", "manifest.json")
"""What step 8 writes, the manifest last."""
MAX_RECORD_BYTES = 2**16
"""Upper limit on a line of a quarantine file."""


def check_writable(faults: Iterable[Fault], unless: Path | None = None) -> None:
    """Check that a step's outputs can be written.

    `unless` is the manifest of work that may be done already: if it exists, nothing is checked, and the step checks
    again once it knows that there is something to do.

    Raises:
        UserError: they cannot; names the setting.
    """
    if unless is not None and os.path.exists(unless):
        return
    found = list(faults)
    if found:
        raise UserError(found)


def of_tokenizer(config: TokenizerConfig) -> Iterator[Fault]:
    """Step 1."""
    folder = Path(config.output_dir)
    under_way = (folder / WORK_NAME).is_dir()
    yield from _of_files(config, "output_dir", folder, tokenizer_files(config), TOKENIZER_STEP, under_way)


def tokenizer_files(config: TokenizerConfig) -> list[Path]:
    """What step 1 writes, the manifest last."""
    return [Path(config.output_dir, name) for name in (*TOKENIZER_NAMES, LOG_NAME, "manifest.json")]


def of_tokens(config: DataSettings) -> Iterator[Fault]:
    """Step 2."""
    folder = TokenPaths(config.output_prefix).work_folder
    under_way = any(folder.glob("*.json"))
    yield from _of_files(config, "output_prefix", folder, token_files(config), TOKENS_STEP, under_way)


def token_files(config: DataSettings) -> list[Path]:
    """What step 2 writes, the manifest last."""
    paths = TokenPaths(config.output_prefix)
    files = [path_of(prefix) for prefix in (paths.train, paths.valid) for path_of in (bin_path, idx_path)]
    return [*files, paths.quarantine, paths.manifest]


def of_run(config: ScheduleSettings) -> Iterator[Fault]:
    """Step 3."""
    folder = Path(config.output_model_dir)
    yield from _first(config, "output_model_dir", [reason_against_folder(folder), *map(_inside, _runs_around(folder))])


def of_export(config: ConvertSettings) -> Iterator[Fault]:
    """Step 4, which replaces an existing folder."""
    folder = Path(config.output_tokenizer_and_model_dir)
    in_the_way = "it is a file" if os.path.exists(folder) and not os.path.isdir(folder) else ""
    if os.path.ismount(folder):
        in_the_way = f"it is a mount point, which cannot be replaced: name a folder in it, {folder}/hf"
    inside = map(_inside, _runs_around(folder))
    yield from _first(config, "output_tokenizer_and_model_dir", [in_the_way, reason_against_entry(folder), *inside])


def of_upload(config: ConvertSettings) -> Iterator[Fault]:
    """Step 6, which leaves a record beside the model."""
    record = Path(config.output_tokenizer_and_model_dir) / UPLOAD_RECORD_NAME
    yield from _first(config, "output_tokenizer_and_model_dir", [reason_against_file(record)])


def of_evaluation(config: EvaluateConfig) -> Iterator[Fault]:
    """Step 8."""
    folder = Path(config.output_dir)
    yield from _of_files(config, "output_dir", folder, evaluation_files(config), EVALUATION_STEP, False)


def evaluation_files(config: EvaluateConfig) -> list[Path]:
    """What step 8 writes, the manifest last."""
    return [Path(config.output_dir, name) for name in EVALUATION_NAMES]


def of_count(config: ScheduleSettings, config_path: Path) -> Iterator[Fault]:
    """``count_tokens.py --write``, which changes the configuration itself."""
    reason = reason_against_file(config_path)
    if reason:
        rule = f"cannot be written into this file: {reason}"
        yield Fault(str(config_path), rule, "train_tokens", config.train_tokens, "make it writable, or copy it first")


def of_line(tokenizer: TokenizerConfig, training: PretrainConfig, converting: ConvertConfig) -> Iterator[Fault]:
    """All steps of a pipeline, but for those that may be done already."""
    export = Path(converting.output_tokenizer_and_model_dir)
    for record, faults in (
        (Path(tokenizer.output_dir) / "manifest.json", of_tokenizer(tokenizer)),
        (TokenPaths(training.output_prefix).manifest, of_tokens(training)),
        (Path(training.output_model_dir) / "manifest.json", of_run(training)),
        (export / "manifest.json", of_export(converting)),
    ):
        if not os.path.exists(record):
            yield from faults


def check_inputs(config: Settings, key: str, inputs: Sequence[InputFile], outputs: Iterable[Path]) -> None:
    """Check that a step reads none of the files that it writes, by any name.

    Raises:
        UserError: it does; names the files.
    """
    written = {_identity(path): path for path in outputs if path.exists()}
    if not written:
        return
    both = [file.name for file in inputs if file.remote is None and _identity(file.path) in written]
    if both:
        rule = f"names {', '.join(both[:5])}, which this step writes itself"
        raise UserError(config.fault(key, rule, "rename or move the input"))


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _of_files(
    config: Settings, key: str, folder: Path, files: Sequence[Path], step: str, under_way: bool
) -> Iterator[Fault]:
    """The reason why `step` cannot write its `files`, the manifest last, or the files of somebody else in its way."""
    reasons = [reason_against_folder(folder), *map(reason_against_file, files)]
    if cannot := list(_first(config, key, reasons)):
        yield from cannot
        return
    record = files[-1]
    for run in _runs_around(record.parent / "any"):
        yield config.fault(key, _inside(run), "choose a folder outside of it")
        return
    ours: set[Path] = set()
    if record.exists():
        try:
            made = manifest.read(record)
        except manifest.NewerFormatError:
            raise
        except UserError:
            made = None
        if made is None or made.step != step:
            by = f"step {made.step!r}" if made else "another program"
            rule = f"cannot be written: {record} is of {by}"
            yield config.fault(key, rule, f"choose another {key}, or move those files away")
            return
        ours = {record.parent / one.path for outputs in made.outputs.values() for one in outputs}
    if under_way:
        return
    others = [path.name for path in files[:-1] if path.exists() and path not in ours and not _is_left_by_us(path)]
    if others:
        what = f"{', '.join(others)}, which no run of this step wrote"
        rule = f"cannot be written: {record.parent} holds {what}"
        yield config.fault(key, rule, f"choose another {key}, or move {'them' if others[1:] else 'it'} away")


def _is_left_by_us(path: Path) -> bool:
    """Whether a file is our log or quarantine file, by its first line: a failed run leaves no manifest."""
    if path.suffix not in (".log", ".jsonl"):
        return False
    with open(path, "rb") as file:
        line = file.readline(MAX_RECORD_BYTES)
    if line == LOG_HEADER.encode():
        return True
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return isinstance(record, dict) and {"file", "line", "offset", "reason", "excerpt"} <= record.keys()


def _runs_around(path: Path) -> Iterator[Path]:
    """The run folders that contain `path`."""
    return (folder for folder in path.absolute().resolve().parents if (folder / IDENTITY_NAME).exists())


def _inside(run: Path) -> str:
    return f"it is in the run folder {run}, which is set aside or deleted as a whole"


def _first(config: Settings, key: str, reasons: Iterable[str]) -> Iterator[Fault]:
    for reason in reasons:
        if reason:
            yield config.fault(key, f"cannot be written: {reason}", "choose a folder where you may write")
            return
