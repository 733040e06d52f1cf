"""To whom a run folder belongs: what a run must not change when it goes on, and what it may, with a word."""

from __future__ import annotations

import fcntl
import shutil
import time
from pathlib import Path
from typing import IO, Any

import orjson

from zerokara.config import RESOLVED_NAME, PretrainConfig, as_yaml, load
from zerokara.durable import write_json, write_text
from zerokara.errors import RunError, UserError
from zerokara.training.planning.preparation import Preparation

IDENTITY_NAME = "run.json"
TOKENIZER_NAME = "tokenizer.model"
LOCK_NAME = "lock"
LOCK_SECONDS = 60
_MAY_CHANGE_SILENTLY = {"output_model_dir", "input_jsonl", "input_tokenizer_file", "output_prefix", "num_workers"}
"""Places and step 2's own settings: their content is told by hashes."""


_NOT_KNOWN_BEFORE: dict[str, Any] = {"curriculum": None, "isolate_documents": False}
"""What a run is of which these are not told: it began before they were settings, or does without them."""


def identity_of(preparation: Preparation) -> dict[str, Any]:
    """What a run is made of; a folder that holds another must not be gone on with."""
    config = preparation.config
    later = {"curriculum": preparation.reading.identity(), "isolate_documents": config.isolate_documents}
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
    write_json(run_dir / IDENTITY_NAME, identity_of(preparation))
    write_text(run_dir / RESOLVED_NAME, as_yaml(config))
    if not (run_dir / TOKENIZER_NAME).exists():
        shutil.copyfile(config.input_tokenizer_file, run_dir / TOKENIZER_NAME)
    return changes


def check(preparation: Preparation) -> list[str]:
    """As `claim`, but only look."""
    run_dir, config = preparation.run_dir, preparation.given
    if not run_dir.exists() or not any(run_dir.iterdir()):
        return []
    path = run_dir / IDENTITY_NAME
    if not path.exists():
        rule = "must be an empty folder or a run of ours; it holds other files"
        raise UserError(config.fault("output_model_dir", rule, "choose another folder"))
    was = {**_NOT_KNOWN_BEFORE, **orjson.loads(path.read_bytes())}
    now = {**_NOT_KNOWN_BEFORE, **identity_of(preparation)}
    differing = [
        f"{key} was {_brief(was.get(key))}, is now {_brief(now.get(key))}"
        for key in now
        if was.get(key) != now[key] and not (key == "curriculum" and _only_longer(was[key], now[key]))
    ]
    if differing:
        rule = "belongs to another run: " + "; ".join(differing)
        raise UserError(
            config.fault("output_model_dir", rule, "choose another output_model_dir, or --redo to start over")
        )
    return _changed_settings(run_dir / RESOLVED_NAME, config)


def lock(run_dir: Path) -> IO[bytes]:
    """Keep every other process from training in this folder until the file that is given is closed.

    Raises:
        RunError: another process holds it, and did not let go within a minute.
    """
    file = open(run_dir / LOCK_NAME, "ab")  # noqa: SIM115  # held open on purpose
    for attempt in range(LOCK_SECONDS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if not attempt:
                print(f"another process is at work in {run_dir}; waiting for it to save and leave", flush=True)
            time.sleep(1)
    file.close()
    raise RunError(f"{run_dir}: another process is training here; stop it first, or choose another output_model_dir")


def check_replaceable(preparation: Preparation) -> list[str]:
    """See that ``--redo`` would delete a run of ours and nothing else; there are no changes to tell then."""
    run_dir = preparation.run_dir
    if run_dir.exists() and any(run_dir.iterdir()) and not (run_dir / IDENTITY_NAME).exists():
        rule = "is no run of ours and will not be deleted"
        raise UserError(preparation.given.fault("output_model_dir", rule, "choose another folder"))
    return []


def clear(run_dir: Path) -> None:
    """Delete a run that `check_replaceable` has seen, once nobody trains in it.

    Raises:
        RunError: another process trains in it.
    """
    if run_dir.exists():
        lock(run_dir).close()
        shutil.rmtree(run_dir)


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


def _brief(value: object) -> str:
    text = str(value)
    return text[:12] + "…" if len(text) == 64 else text
