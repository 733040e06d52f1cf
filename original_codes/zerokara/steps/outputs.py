"""What each step writes, and whether it can: asked at its start and by ``--dry-run`` alike, before any work."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from zerokara.errors import Fault, UserError
from zerokara.tokens.layout import TokenPaths, bin_path, idx_path
from zerokara.writable import reason_against_entry, reason_against_file, reason_against_folder

if TYPE_CHECKING:  # building a class takes time, and a step needs one of them
    from zerokara.config import ConvertConfig, PretrainConfig, Settings, TokenizerConfig

TOKENIZER_NAMES = ("tokenizer.model", "tokenizer.vocab", "report.json", "report.txt", "report.html")
"""What step 1 leaves in `output_dir`, beside its log and its manifest."""
LOG_NAME = "training.log"
UPLOAD_RECORD_NAME = "upload.manifest.json"
"""What step 6 leaves beside the model; it is not sent."""


def check(faults: Iterable[Fault], unless: Path | None = None) -> None:
    """Check that a step's outputs can be written.

    `unless` names the manifest of work that may be done already, and is then only told: where it is there, the step
    asks again when it knows that there is something to do.

    Raises:
        UserError: they cannot; names the key.
    """
    if unless is not None and os.path.exists(unless):
        return
    found = list(faults)
    if found:
        raise UserError(found)


def of_tokenizer(config: TokenizerConfig) -> Iterator[Fault]:
    """Step 1."""
    folder = Path(config.output_dir)
    names = (*TOKENIZER_NAMES, LOG_NAME, "manifest.json")
    reasons = [reason_against_folder(folder), *(reason_against_file(folder / name) for name in names)]
    yield from _first(config, "output_dir", reasons)


def of_tokens(config: PretrainConfig) -> Iterator[Fault]:
    """Step 2."""
    paths = TokenPaths(config.output_prefix)
    files = [path_of(prefix) for prefix in (paths.train, paths.valid) for path_of in (bin_path, idx_path)]
    files += [paths.quarantine, paths.manifest]
    reasons = [reason_against_folder(paths.work_folder), *map(reason_against_file, files)]
    yield from _first(config, "output_prefix", reasons)


def of_run(config: PretrainConfig) -> Iterator[Fault]:
    """Step 3."""
    yield from _first(config, "output_model_dir", [reason_against_folder(Path(config.output_model_dir))])


def of_export(config: ConvertConfig) -> Iterator[Fault]:
    """Step 4, whose folder takes the place of the one that is there."""
    folder = Path(config.output_tokenizer_and_model_dir)
    in_the_way = "it is a file" if os.path.exists(folder) and not os.path.isdir(folder) else ""
    yield from _first(config, "output_tokenizer_and_model_dir", [in_the_way, reason_against_entry(folder)])


def of_upload(config: ConvertConfig) -> Iterator[Fault]:
    """Step 6, which leaves a record beside the model."""
    record = Path(config.output_tokenizer_and_model_dir) / UPLOAD_RECORD_NAME
    yield from _first(config, "output_tokenizer_and_model_dir", [reason_against_file(record)])


def of_count(config: PretrainConfig, config_path: Path) -> Iterator[Fault]:
    """``count_tokens.py --write``, which changes the configuration itself."""
    reason = reason_against_file(config_path)
    if reason:
        rule = f"cannot be written into this file: {reason}"
        yield Fault(str(config_path), rule, "train_tokens", config.train_tokens, "make it writable, or copy it first")


def of_line(tokenizer: TokenizerConfig, training: PretrainConfig, converting: ConvertConfig) -> Iterator[Fault]:
    """All steps of a line, but for those that may be done already."""
    export = Path(converting.output_tokenizer_and_model_dir)
    for record, faults in (
        (Path(tokenizer.output_dir) / "manifest.json", of_tokenizer(tokenizer)),
        (TokenPaths(training.output_prefix).manifest, of_tokens(training)),
        (Path(training.output_model_dir) / "manifest.json", of_run(training)),
        (export / "manifest.json", of_export(converting)),
    ):
        if not os.path.exists(record):
            yield from faults


def _first(config: Settings, key: str, reasons: Iterable[str]) -> Iterator[Fault]:
    for reason in reasons:
        if reason:
            yield config.fault(key, f"cannot be written: {reason}", "choose a place where you may write")
            return
