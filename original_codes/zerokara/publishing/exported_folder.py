"""The folder of an export: its manifest, proof and files, and the checks before step 4 replaces it.

No torch here: the upload, and what step 4 checks first, start in well under a second.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zerokara.base import manifest
from zerokara.base.durable import PARTIAL_SUFFIX, write_file, write_json
from zerokara.base.errors import Fault, UserError, nearest, refuse
from zerokara.base.progress import bytes_text
from zerokara.base.resources import free_bytes
from zerokara.config.loading import RESOLVED_NAME, load_run
from zerokara.examples import facts
from zerokara.tokens.indexed import IndexedTokens, TokenPaths

if TYPE_CHECKING:  # step 1 asks for a name here, and needs neither
    from zerokara.config.convert_config import ConvertConfig, ConvertSettings
    from zerokara.publishing.checkpoint_source import CheckpointSource

STEP = "convert"
CARD_NAME = "README.md"
_KEY = "output_tokenizer_and_model_dir"
_BYTES_PER_WEIGHT = {"fp32": 4, "bf16": 2}
_OTHER_BYTES = 64 * 2**20
"""Space for everything but the weights: tokenizer, training curve, model card."""
_REMEDY = "run step 4 again with --redo"


def work(source: "CheckpointSource", settings: "ConvertConfig") -> manifest.StepSpec:
    """Settings and inputs of the conversion, for the chain of manifests."""
    names = ("dtype", "max_shard_size", "check_lines", "test_prompt_text")
    read: dict[str, manifest.Inputs] = {"checkpoint": source.folder / manifest.NAME, "tokenizer": source.tokenizer_path}
    if source.averaged:
        read["averaged checkpoints"] = [folder / manifest.NAME for folder in source.averaged_folders]
    of_step_7 = {"chat_template": facts.CHAT_TEMPLATE_NAME, "finetuning": facts.NAME}
    read |= {key: source.run_dir / name for key, name in of_step_7.items() if (source.run_dir / name).is_file()}
    return manifest.StepSpec(
        step=STEP,
        settings={name: getattr(settings, name) for name in names},
        inputs={f"input_model_dir (its {key})": path for key, path in read.items()},
    )


def check_place(settings: "ConvertSettings", source: "CheckpointSource") -> None:
    """Check that Hugging Face has a class for the model, and that the output folder may be written, or replaced.

    Raises:
        UserError: there is no class; the folder holds something that step 4 did not write, or the run itself.
    """
    architecture, reason = source.shape.architecture, source.shape.traits.no_class
    if reason:
        rule = f"has architecture {architecture}, for which Hugging Face has no class: {reason}"
        remedy = "it can only be trained and evaluated here; for a model to export, train architecture: switch or t5"
        raise UserError(Fault(str(source.folder), rule, remedy=remedy))
    folder = Path(settings.output_tokenizer_and_model_dir)
    real, inside = folder.resolve(), {source.run_dir.resolve(), *source.run_dir.resolve().parents}
    if real in inside:
        raise UserError(settings.fault(_KEY, f"holds the run {source.run_dir} itself", "choose another folder"))
    if real.is_mount() or real == Path.cwd():
        rule = f"is {'a mount point' if real.is_mount() else 'the current folder'}, which cannot be replaced"
        raise UserError(settings.fault(_KEY, rule, f"name a folder in it, {folder}/hf"))
    if not is_export(folder) and folder.exists() and any(folder.iterdir()):
        rule = "holds files that step 4 did not write, and would replace"
        raise UserError(settings.fault(_KEY, rule, "choose another folder, or empty this one"))


def check_space(settings: "ConvertSettings", source: "CheckpointSource") -> None:
    """Check that the export fits on the disk; a folder to be replaced stays until the new one is complete.

    Raises:
        UserError: it does not; says how much is missing.
    """
    folder = Path(settings.output_tokenizer_and_model_dir).absolute()
    weights = source.shape.num_parameters(padded=False) * _BYTES_PER_WEIGHT[settings.dtype]
    needed = weights + _OTHER_BYTES
    leftover = folder.with_name(folder.name + PARTIAL_SUFFIX)  # of a killed run; deleted first
    free = free_bytes(folder.parent) + sum(file.stat().st_size for file in leftover.rglob("*") if file.is_file())
    if free < needed:
        rule = f"has {bytes_text(free)} free, and the export needs {bytes_text(needed)} (weights in {settings.dtype})"
        remedy = f"free {bytes_text(needed - free)}, or choose a folder on another disk"
        raise UserError(settings.fault(_KEY, rule, remedy))


def to_keep(folder: Path) -> list[str]:
    """Files of an export to be replaced that step 4 did not write, or that were changed since."""
    record = folder / manifest.NAME
    if not record.exists():
        return []
    ours = {one.path: one for one in files(manifest.read(record))}
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(
        name
        for name in found
        if name != manifest.NAME
        and not name.startswith(".cache/")  # of huggingface_hub
        and (name not in ours or not manifest.is_unchanged(ours[name], record))
    )


def is_export(folder: Path) -> bool:
    """True for a folder that step 4 wrote."""
    try:
        return manifest.read(folder / manifest.NAME).step == STEP
    except UserError:  # there is no manifest, or it is of another program
        return False


def begins_documents(folder: Path) -> bool:
    """False of an export in whose training nothing stood before a document, whatever its tokenizer puts there."""
    if not is_export(folder):
        return True
    return bool(manifest.read(folder / manifest.NAME).facts.get("tokenizer", {}).get("start_id", -1) >= 0)


def proved(folder: Path) -> manifest.Manifest:
    """Return the manifest of a folder that step 4 wrote and proved.

    Raises:
        UserError: there is no folder, no manifest, another step's manifest, or the proof did not hold.
    """
    path = folder / manifest.NAME
    if not path.exists():
        rule = "holds no export: step 4 did not write or finish it" if folder.exists() else "there is no such folder"
        raise UserError(Fault(str(folder), rule, remedy=nearest(folder, "run step 4")))
    export = manifest.read(path)
    if export.step != STEP:
        rule = f"was written by step {export.step!r}, not by the conversion of step 4"
        raise UserError(Fault(str(path), rule, remedy="name the folder that step 4 wrote"))
    if export.facts.get("proof", {}).get("holds") is not True:
        raise UserError(Fault(str(path), "has no proof that the exported model equals the trained one", remedy=_REMEDY))
    return export


def prompts(folder: Path, settings: "ConvertSettings") -> list[str]:
    """`test_prompt_text`; for `auto` the prompts that step 4 chose for this folder, or a count for another model.

    Those of a fine-tuned model are inputs, without the template around them.
    """
    record, tuned = folder / manifest.NAME, facts.read(folder)
    samples = manifest.read(record).facts.get("samples", []) if record.exists() else []
    chosen = [sample["prompt"] for sample in samples] or ["1, 2, 3,"]
    if settings.test_prompt_text != "auto":
        chosen = list(settings.test_prompt_text)
    return [tuned.input_of(text) for text in chosen] if tuned else chosen


def files(export: manifest.Manifest) -> list[manifest.FileRecord]:
    """All files of an export, by path."""
    return sorted((record for records in export.outputs.values() for record in records), key=lambda record: record.path)


def checked_files(folder: Path, export: manifest.Manifest) -> list[manifest.FileRecord]:
    """Compare all files but the model card with the manifest, and return their records, with one of the present card.

    Raises:
        UserError: lists every file that is missing, or has changed since it was proved.
    """
    record_path, rule = folder / manifest.NAME, "is missing, or has changed since the export was proved"
    card, proved = folder / CARD_NAME, [record for record in files(export) if record.path != CARD_NAME]
    changed = [record.path for record in proved if not manifest.is_unchanged(record, record_path)]
    changed += [] if card.is_file() else [card.name]
    refuse(Fault(str(folder / path), rule, remedy=_REMEDY) for path in changed)
    return [*proved, _card_record(card)]


def read_card(folder: Path) -> str:
    """Return the text of the model card in a folder of any origin, of an empty one if there is none.

    Raises:
        UserError: it cannot be read.
    """
    import yaml
    from huggingface_hub import ModelCard

    path = folder / CARD_NAME
    try:
        ModelCard(text := path.read_text(encoding="utf-8") if path.is_file() else "---\n{}\n---\n")
    except (ValueError, TypeError, yaml.YAMLError) as error:
        rule = f"is no UTF-8 text with YAML between two lines ---: {' '.join(str(error).split())}"
        raise UserError(Fault(str(path), rule, remedy="repair the file")) from error
    return text


def write_card(folder: Path, text: str) -> None:
    """Write the model card. The manifest records it, unless somebody edited the one before, which step 4 then keeps."""
    card, record_path = folder / CARD_NAME, folder / manifest.NAME
    made = manifest.read(record_path) if is_export(folder) else None
    is_ours = made and all(manifest.is_unchanged(each, record_path) for each in made.outputs["card"])
    write_file(card, text)
    if made and is_ours:
        write_json(record_path, asdict(replace(made, outputs={**made.outputs, "card": [_card_record(card)]})))


def _card_record(card: Path) -> manifest.FileRecord:
    key = manifest.file_key(card)
    return manifest.FileRecord(card.name, key.bytes, manifest.sha256_of(card), key.modified_ns)


def tokens_of(output_prefix: str, sha256: str | None) -> manifest.Manifest | None:
    """Return the manifest of the token files with this prefix; None where they are others than those with this hash."""
    try:
        made = manifest.read(TokenPaths(output_prefix).manifest)
    except UserError:
        return None
    return made if sha256 in {record.sha256 for record in files(made)} else None


def validation_text(
    model_dir: Path, run_dir: Path, decode: Callable[[list[int]], str], max_tokens: int = 2000
) -> str | None:
    """Return the first validation documents, up to `max_tokens`, or None if they are not on this machine.

    `run_dir` is the run folder, or a checkpoint in it, that `model_dir` was exported from. The documents are those that
    the model was validated on only if the hash of the training tokens is the one in the export's manifest.
    """
    folder = run_dir if (run_dir / RESOLVED_NAME).is_file() else run_dir.parent
    try:
        prefix = load_run(folder / RESOLVED_NAME).output_prefix
        trained_on = manifest.read(model_dir / manifest.NAME).facts.get("data", {}).get("sha256")
    except UserError:
        return None
    if tokens_of(prefix, trained_on) is None:
        return None
    tokens, texts, room = IndexedTokens(TokenPaths(prefix).valid), [], max_tokens
    for number in range(len(tokens)):
        texts.append(decode(tokens[number][:room].tolist()))
        room -= len(tokens[number])
        if room <= 0:
            break
    return "\n".join(texts) or None
