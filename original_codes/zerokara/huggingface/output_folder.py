"""The place of the exported folder: nobody's files in the way, room on the disk, and what is said when it is full.

No torch here: a full disk is told before anything heavy is loaded.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zerokara import manifest
from zerokara.config.convert_config import ConvertConfig
from zerokara.durable import PARTIAL_SUFFIX
from zerokara.errors import Fault, RunError, UserError
from zerokara.huggingface.exported import MANIFEST_NAME, STEP, UPLOAD_RECORD_NAME
from zerokara.huggingface.source import Source
from zerokara.progress import bytes_text

BYTES_PER_WEIGHT = {"fp32": 4, "bf16": 2}
OWN_RECORDS = (MANIFEST_NAME, UPLOAD_RECORD_NAME)
OTHER_BYTES = 64 * 2**20
"""For all that is not weights: tokenizer, curve, card."""


def check_class(source: Source) -> None:
    """Check that a class of Hugging Face's holds such a model.

    Raises:
        UserError: none does; says why, and what does.
    """
    architecture, reason = source.shape.architecture, source.shape.traits.no_class
    if reason:
        rule = f"is of architecture {architecture}, which no Hugging Face class holds: {reason}"
        remedy = "it trains and is evaluated here; a model to export is trained with architecture: switch or t5"
        raise UserError(Fault(str(source.folder), rule, remedy=remedy))


def check_place(settings: ConvertConfig, source: Source) -> None:
    """Check that the output folder may be written, and when it is there, replaced.

    Raises:
        UserError: it holds something that no conversion wrote, or the run itself.
    """
    key, folder = "output_tokenizer_and_model_dir", Path(settings.output_tokenizer_and_model_dir)
    inside = {source.run_dir.resolve(), *source.run_dir.resolve().parents}
    if folder.resolve() in inside:
        raise UserError(settings.fault(key, f"holds the run {source.run_dir} itself", "choose another folder"))
    if not folder.exists() or not any(folder.iterdir()):
        return
    path = folder / MANIFEST_NAME
    if not path.exists() or manifest.read(path).step != STEP:
        rule = "holds files that step 4 did not write; they would be lost"
        raise UserError(settings.fault(key, rule, "choose another folder, or empty this one"))


def to_keep(folder: Path) -> list[str]:
    """The files in an export that is about to be replaced which step 4 did not write, or not as they are now."""
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


def check_space(settings: ConvertConfig, source: Source) -> None:
    """Check that what will be written fits on the disk; what lies at its name stays until the new folder is whole.

    Raises:
        UserError: there is too little room; with the numbers.
    """
    key, folder = "output_tokenizer_and_model_dir", Path(settings.output_tokenizer_and_model_dir).absolute()
    weights = source.shape.num_parameters(padded=False) * BYTES_PER_WEIGHT[settings.dtype]
    needed = weights + OTHER_BYTES
    there = next(place for place in folder.parents if place.exists())
    leftover = folder.with_name(folder.name + PARTIAL_SUFFIX)  # of a killed run, and deleted first
    free = shutil.disk_usage(there).free + sum(file.stat().st_size for file in leftover.rglob("*") if file.is_file())
    if free < needed:
        rule = (
            f"the disk has {bytes_text(free)} free there, and the export needs {bytes_text(needed)} "
            f"({bytes_text(weights)} of weights in {settings.dtype})"
        )
        remedy = f"free {bytes_text(needed - free)}, or choose a folder on another disk"
        raise UserError(settings.fault(key, rule, remedy))


@contextmanager
def full_disk_told(folder: Path) -> Iterator[None]:
    """Word what the system says when `folder`, which did not appear then, finds no room.

    Raises:
        RunError: the disk, the quota or the limit of a file's size is exhausted.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        there = next(place for place in folder.absolute().parents if place.exists())
        at = f" at {error.filename}" if error.filename else ""
        raise RunError(
            f"there was no room for the export{at}: {error.strerror}. What was written of it is deleted again, and "
            f"{bytes_text(shutil.disk_usage(there).free)} are free in {there} now; make room and run the same command "
            "again, or set output_tokenizer_and_model_dir elsewhere"
        ) from error
