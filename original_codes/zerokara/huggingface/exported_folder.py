"""An exported folder as steps 4 and 6 find it: its manifest, its proof, and whether its files are unchanged.

No torch here: the upload starts in well under a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zerokara import hashing, manifest
from zerokara.errors import Fault, UserError
from zerokara.examples import facts

if TYPE_CHECKING:  # step 1 asks for a name here, and needs neither
    from zerokara.config.convert_config import ConvertConfig
    from zerokara.huggingface.checkpoint_source import CheckpointSource

STEP = "convert"
MANIFEST_NAME = "manifest.json"
UPLOAD_RECORD_NAME = "upload.manifest.json"
"""What step 6 leaves beside the model; it is not uploaded."""
_REMEDY = "run step 4 again with --redo"


def work(source: CheckpointSource, settings: ConvertConfig) -> manifest.StepSpec:
    """The conversion to do, for the chain of manifests."""
    names = (
        "dtype", "max_shard_size", "check_lines", "test_prompt_text", "huggingface_name", "language", "license",
    )  # fmt: skip
    inputs = {"checkpoint": source.manifest_path, "tokenizer": source.tokenizer_path}
    # What step 7 left there, if it did.
    left = {"chat_template": facts.CHAT_TEMPLATE_NAME, "finetuning": facts.NAME}
    inputs |= {key: source.run_dir / name for key, name in left.items() if (source.run_dir / name).is_file()}
    return manifest.StepSpec(
        step=STEP,
        settings={name: getattr(settings, name) for name in names},
        inputs=inputs,
        key_of=lambda name: f"input_model_dir (its {name})" if name in inputs else name,
    )


def proved(folder: Path) -> manifest.Manifest:
    """Return the manifest of a folder that step 4 wrote and proved.

    Raises:
        UserError: there is no folder, no manifest, another step's manifest, or the proof did not hold.
    """
    path = folder / MANIFEST_NAME
    if not path.exists():
        rule = "holds no export: step 4 did not write it, or did not finish"
        raise UserError(Fault(where=str(folder), rule=rule, remedy="run step 4"))
    made = manifest.read(path)
    if made.step != STEP:
        rule = f"was written by step {made.step!r}, not by the conversion of step 4"
        raise UserError(Fault(where=str(path), rule=rule, remedy="name the folder that step 4 wrote"))
    if made.facts.get("proof", {}).get("holds") is not True:
        rule = "has no proof that the exported model equals the trained one"
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
