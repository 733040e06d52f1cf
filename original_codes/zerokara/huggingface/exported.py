"""An exported folder as later steps meet it: its manifest, its proof, and whether its files are still the same.

No torch here: the upload starts in well under a second.
"""

from __future__ import annotations

from pathlib import Path

from zerokara import hashing, manifest
from zerokara.errors import Fault, UserError

STEP = "convert"
MANIFEST_NAME = "manifest.json"
UPLOAD_RECORD_NAME = "upload.manifest.json"
"""What step 6 leaves beside the model; it is not sent."""
_REMEDY = "run step 4 again with --redo"


def proved(folder: Path) -> manifest.Manifest:
    """The manifest of a folder that step 4 wrote and proved.

    Raises:
        UserError: there is no folder, no manifest, another step's manifest, or the proof did not hold.
    """
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        remedy = "run step 4 first"
        raise UserError(Fault(where=str(folder), rule="there is no exported model here", remedy=remedy))
    if not path.exists():
        rule = "has no manifest.json: step 4 did not write it, or did not end"
        raise UserError(Fault(where=str(folder), rule=rule, remedy="run step 4 again"))
    made = manifest.read(path)
    if made.step != STEP:
        rule = f"was written by step {made.step!r}, not by the conversion of step 4"
        raise UserError(Fault(where=str(path), rule=rule, remedy="name the folder that step 4 wrote"))
    if made.facts.get("proof", {}).get("holds") is not True:
        rule = "does not say that the exported model was proved equal to the trained one"
        raise UserError(Fault(where=str(path), rule=rule, remedy=_REMEDY))
    return made


def files(made: manifest.Manifest) -> list[manifest.FileRecord]:
    """All files of an export, by path."""
    return sorted((record for records in made.outputs.values() for record in records), key=lambda record: record.path)


def check_unchanged(folder: Path, made: manifest.Manifest) -> None:
    """Check every file against the manifest, by content.

    Raises:
        UserError: lists every file that is missing, has changed since it was proved, or lies elsewhere.
    """
    faults = []
    for record in files(made):
        path = folder / record.path
        if Path(record.path).is_absolute() or ".." in Path(record.path).parts:
            rule = f"names a file outside the exported folder: {record.path}"
            faults.append(Fault(where=str(folder / MANIFEST_NAME), rule=rule, remedy=_REMEDY))
        elif not path.is_file():
            faults.append(Fault(where=str(path), rule="is missing from the exported folder", remedy=_REMEDY))
        elif path.stat().st_size != record.bytes or hashing.sha256_of(path) != record.sha256:
            rule = "has changed since the export was proved"
            faults.append(Fault(where=str(path), rule=rule, remedy=_REMEDY))
    if faults:
        raise UserError(faults)
