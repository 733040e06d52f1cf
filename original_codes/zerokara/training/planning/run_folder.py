"""To whom a run folder belongs: what a run must not change when it goes on, and what it may, with a word."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import orjson

from zerokara import checkpoint
from zerokara.checkpoint.folders import IDENTITY_NAME
from zerokara.config.loading import load
from zerokara.config.pretrain_config import RESOLVED_NAME, PretrainConfig
from zerokara.config.rendering import as_yaml
from zerokara.durable import ASIDE_ENDING, PARTIAL_SUFFIX, unused_name, write_bytes, write_json, write_text
from zerokara.errors import Fault, UserError
from zerokara.progress import bytes_text
from zerokara.training.planning import run_lock, setting_names
from zerokara.training.planning.run_plan import RunPlan as Preparation

TOKENIZER_NAME = "tokenizer.model"
MANIFEST_NAME = "manifest.json"
METRICS_NAME = "metrics.jsonl"
_READ = ("init_from", "input_tokenizer_file", "output_prefix", "deepspeed_template")
"""Settings that name what a run reads."""
_MAY_CHANGE_SILENTLY = {"output_model_dir", "input_jsonl", "input_tokenizer_file", "output_prefix", "num_workers"}
"""Places and step 2's own settings: their content is told by hashes."""


_NOT_KNOWN_BEFORE: dict[str, Any] = {"curriculum": None, "intra_document_masking": False}
"""What a run is of which these are not told: it began before they were settings, or does without them."""


def identity_of(preparation: Preparation) -> dict[str, Any]:
    """What a run is made of; a folder that holds another must not be gone on with."""
    config = preparation.config
    later = {"curriculum": preparation.reading.identity(), "intra_document_masking": config.intra_document_masking}
    return {
        **preparation.shape.as_json(),
        "seed": config.seed,
        "order": config.order,
        "tokenizer_sha256": preparation.tokenizer_sha256,
        "data_sha256": preparation.data_sha256,
        **{key: value for key, value in later.items() if value != _NOT_KNOWN_BEFORE[key]},
    }


def claim(preparation: Preparation) -> list[str]:
    """Make the run folder, or go on with the one there; gives a word for each setting that changed since.

    Raises:
        UserError: the folder holds another run, or files that are none of ours; nothing in it is touched.
    """
    run_dir, config = preparation.run_dir, preparation.given
    changes = check(preparation)
    run_dir.mkdir(parents=True, exist_ok=True)
    if not is_begun(run_dir) or not (run_dir / TOKENIZER_NAME).exists():
        write_bytes(run_dir / TOKENIZER_NAME, Path(config.input_tokenizer_file).read_bytes())
    write_json(run_dir / IDENTITY_NAME, identity_of(preparation))
    write_text(run_dir / RESOLVED_NAME, as_yaml(config))
    return changes


def check(preparation: Preparation) -> list[str]:
    """As `claim`, but only look."""
    run_dir, config = preparation.run_dir, preparation.given
    check_ours(preparation)
    if not is_begun(run_dir):
        return []
    was = {**_NOT_KNOWN_BEFORE, **orjson.loads((run_dir / IDENTITY_NAME).read_bytes())}
    now = {**_NOT_KNOWN_BEFORE, **identity_of(preparation)}
    if _only_longer(was["curriculum"], now["curriculum"]):
        was["curriculum"] = now["curriculum"]
    if differing := setting_names.differences(was, now):
        rule = "belongs to another run: " + "; ".join(differing)
        remedy = "choose another output_model_dir, or --redo to set that run aside and start over"
        raise UserError(config.fault("output_model_dir", rule, remedy))
    return _changed_settings(run_dir / RESOLVED_NAME, config)


def check_ours(preparation: Preparation) -> None:
    """See that the run folder is empty or holds a run of ours.

    Raises:
        UserError: it holds other files.
    """
    run_dir = preparation.run_dir
    if not run_dir.exists() or (run_dir / IDENTITY_NAME).exists():
        return
    # A start may have been killed before it had written the first file.
    others = [path for path in run_dir.iterdir() if path.name not in run_lock.NAMES and not _is_half_written(path)]
    if others:
        rule = "must be an empty folder or a run of ours; it holds other files"
        raise UserError(preparation.given.fault("output_model_dir", rule, "choose another folder"))


def is_begun(run_dir: Path) -> bool:
    """Whether anything was trained here; a start that was aborted before its first step leaves nothing to keep to."""
    if checkpoint.all_steps(run_dir) or checkpoint.broken_names(run_dir) or (run_dir / MANIFEST_NAME).exists():
        return True
    recorded = run_dir / METRICS_NAME  # steps that were never saved
    return recorded.exists() and b'"loss":' in recorded.read_bytes()


def check_redo(preparation: Preparation) -> list[str]:
    """See that the run folder may be set aside, and say what that means; nothing where there is nothing to keep.

    Raises:
        UserError: it holds other files than a run's, or something that the new run is to read.
    """
    run_dir, config = preparation.run_dir, preparation.given
    check_ours(preparation)
    if not is_begun(run_dir):
        return []
    rule = f"lies in the run folder {run_dir}, which --redo would set aside"
    remedy = "move it, or choose another output_model_dir"
    read: dict[str, tuple[str, ...]] = {
        key: (getattr(config, key),) for key in _READ if getattr(config, key) not in ("", "auto")
    }
    read["input_jsonl"] = tuple(entry.removeprefix("@") for entry in config.input_jsonl)
    here = run_dir.resolve()
    faults = [
        config.fault(key, rule, remedy)
        for key, paths in read.items()
        if any(Path(path).expanduser().resolve().is_relative_to(here) for path in paths)
    ]
    if config.path.resolve().is_relative_to(here):
        faults.append(Fault(str(config.path), rule, remedy="copy it elsewhere, and name the copy by --config"))
    if faults:
        raise UserError(faults)
    steps = checkpoint.all_steps(run_dir)
    reached = f"its newest checkpoint is of step {steps[-1]:,}" if steps else "it has no checkpoint"
    size = bytes_text(sum(path.stat().st_size for path in run_dir.rglob("*") if path.is_file()))
    standing = "complete, " if (run_dir / MANIFEST_NAME).exists() else ""
    if steps and not standing and _resumes(preparation):
        standing = "which this command resumes without --redo, "
    return [
        f"--redo sets the run {run_dir} aside as {_free_name(run_dir)}: {standing}{reached}, {size}",
        f"once you do not need it any more: {shlex.join(['rm', '-r', str(_free_name(run_dir))])}",
    ]


def set_aside(run_dir: Path) -> None:
    """Give a run that `check_redo` has seen, and `run_lock` holds, another name, and make an empty folder in its place.

    Raises:
        UserError: the folder cannot be renamed.
    """
    if not is_begun(run_dir):
        return
    # Where the name is a link, the folder that it leads to is renamed, and the new run lies on the same disk.
    folder, old = run_dir.resolve(), _free_name(run_dir)
    try:
        folder.rename(old)
    except OSError as error:
        rule = f"cannot be set aside as {old}: {error.strerror}"
        raise UserError(Fault(str(run_dir), rule, remedy="move it away yourself, or choose another folder")) from error
    folder.mkdir()
    run_lock.move(old, folder)


def _resumes(preparation: Preparation) -> bool:
    try:
        check(preparation)
    except UserError:
        return False
    return True


def _free_name(run_dir: Path) -> Path:
    return unused_name(run_dir.resolve() if run_dir.is_symlink() else run_dir, ASIDE_ENDING)


def _is_half_written(path: Path) -> bool:
    names = (IDENTITY_NAME, RESOLVED_NAME, TOKENIZER_NAME)
    return path.name.endswith(PARTIAL_SUFFIX) and path.name.startswith(names)


def _changed_settings(path: Path, config: PretrainConfig) -> list[str]:
    if not path.exists():
        return []
    before = load(PretrainConfig, path)
    return [
        f"{key}: {getattr(before, key)} → {getattr(config, key)}"
        for key in PretrainConfig.model_fields
        if key not in _MAY_CHANGE_SILENTLY and getattr(before, key) != getattr(config, key)
    ]


def _only_longer(was: dict[str, Any] | None, now: dict[str, Any] | None) -> bool:
    """Whether a curriculum has got further stages behind the last one, which had an end: its past is the same."""
    if not was or not now or was["source_tokens"] != now["source_tokens"]:
        return False
    before, after = was["stages"], now["stages"]
    return before[-1]["samples"] is not None and after[: len(before)] == before
