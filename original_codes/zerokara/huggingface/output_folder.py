"""The output folder of an export: what may be replaced there, room on the disk, and the message when the disk is full.

No torch here: these checks come before anything heavy is imported.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zerokara import manifest
from zerokara.config.convert_config import ConvertSettings
from zerokara.durable import PARTIAL_SUFFIX
from zerokara.errors import Fault, RunError, UserError
from zerokara.huggingface.checkpoint_source import CheckpointSource
from zerokara.huggingface.exported_folder import MANIFEST_NAME, STEP, UPLOAD_RECORD_NAME
from zerokara.progress import bytes_text

BYTES_PER_WEIGHT = {"fp32": 4, "bf16": 2}
OWN_RECORDS = (MANIFEST_NAME, UPLOAD_RECORD_NAME)
OTHER_BYTES = 64 * 2**20
"""For everything but the weights: tokenizer, training curve, model card."""


def check_class(source: CheckpointSource) -> None:
    """Check that Hugging Face has a class for this architecture.

    Raises:
        UserError: it has none; says why, and which architecture has one.
    """
    architecture, reason = source.shape.architecture, source.shape.traits.no_class
    if reason:
        rule = f"has architecture {architecture}, for which Hugging Face has no class: {reason}"
        remedy = "it can only be trained and evaluated here; for a model to export, train architecture: switch or t5"
        raise UserError(Fault(str(source.folder), rule, remedy=remedy))


def check_place(settings: ConvertSettings, source: CheckpointSource) -> None:
    """Check that the output folder may be written, and replaced if it exists.

    Raises:
        UserError: it holds something that step 4 did not write, or the run itself.
    """
    key, folder = "output_tokenizer_and_model_dir", Path(settings.output_tokenizer_and_model_dir)
    inside = {source.run_dir.resolve(), *source.run_dir.resolve().parents}
    if folder.resolve() in inside:
        raise UserError(settings.fault(key, f"holds the run {source.run_dir} itself", "choose another folder"))
    if folder.is_mount():
        rule = "is a mount point, which cannot be replaced"
        raise UserError(settings.fault(key, rule, f"name a folder in it, {folder}/hf"))
    if not folder.exists() or not any(folder.iterdir()):
        return
    path = folder / MANIFEST_NAME
    if not path.exists() or manifest.read(path).step != STEP:
        rule = "holds files that step 4 did not write, and would replace"
        raise UserError(settings.fault(key, rule, "choose another folder, or empty this one"))


def to_keep(folder: Path) -> list[str]:
    """Files of an export to be replaced that step 4 did not write, or that were changed since."""
    record = folder / MANIFEST_NAME
    if not record.exists():
        return []
    ours = {one.path: one for outputs in manifest.read(record).outputs.values() for one in outputs}
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(
        name
        for name in found
        if name not in OWN_RECORDS
        and not name.startswith(".cache/")  # of huggingface_hub
        and (name not in ours or not manifest.is_unchanged(ours[name], record))
    )


def check_space(settings: ConvertSettings, source: CheckpointSource) -> None:
    """Check that the export fits on the disk; a folder to be replaced stays until the new one is complete.

    Raises:
        UserError: there is too little room; says how much is missing.
    """
    key, folder = "output_tokenizer_and_model_dir", Path(settings.output_tokenizer_and_model_dir).absolute()
    weights = source.shape.num_parameters(padded=False) * BYTES_PER_WEIGHT[settings.dtype]
    needed = weights + OTHER_BYTES
    parent = next(place for place in folder.parents if place.exists())
    leftover = folder.with_name(folder.name + PARTIAL_SUFFIX)  # of a killed run; deleted first
    free = shutil.disk_usage(parent).free + sum(file.stat().st_size for file in leftover.rglob("*") if file.is_file())
    if free < needed:
        rule = (
            f"the disk has {bytes_text(free)} free there, and the export needs {bytes_text(needed)} "
            f"({bytes_text(weights)} of weights in {settings.dtype})"
        )
        remedy = f"free {bytes_text(needed - free)}, or choose a folder on another disk"
        raise UserError(settings.fault(key, rule, remedy))


@contextmanager
def full_disk_explained(folder: Path) -> Iterator[None]:
    """Turn the system's error about a full disk into an explanation; `folder` did not appear then.

    Raises:
        RunError: the disk, the quota or the file size limit is exhausted.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        parent = next(place for place in folder.absolute().parents if place.exists())
        at = f" at {error.filename}" if error.filename else ""
        raise RunError(
            f"no room for the export{at}: {error.strerror}. The unfinished export was deleted, and "
            f"{bytes_text(shutil.disk_usage(parent).free)} are free in {parent} now; make room and run the same "
            "command again, or set output_tokenizer_and_model_dir to a folder on another disk"
        ) from error
