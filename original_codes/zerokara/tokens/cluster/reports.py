"""What the process of a part leaves in the work folder for the step: its error, and hashes of files of its own disk."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from zerokara.durable import write_bytes, write_json
from zerokara.errors import Fault, RunError, UserError, shown
from zerokara.hashing import FileKey
from zerokara.tokenizer.fast_encoder import FastEncoderDiffersError
from zerokara.tokens import work_folder
from zerokara.tokens.cluster.parts import part_path
from zerokara.tokens.corpus_content import FileRecord


def tell_error(folder: Path, number: int, error: Exception) -> None:
    """Leave the error that ended a part."""
    content: dict[str, Any] = {"host": socket.gethostname(), "text": str(error)}
    if isinstance(error, FastEncoderDiffersError):
        content |= {"kind": "encoder", "text": error.excerpt}
    elif isinstance(error, UserError):
        faults = [(fault.where, fault.key, fault.rule, fault.remedy) for fault in error.faults]
        content |= {"kind": "user", "faults": faults}
    elif isinstance(error, RunError):
        content |= {"kind": "run"}
    elif isinstance(error, OSError):
        content |= {"kind": "system", "number": error.errno, "file": shown(os.fsdecode(error.filename or ""))}
        content["text"] = error.strerror or str(error)
    else:
        content |= {"kind": "unforeseen", "text": traceback.format_exc()}
    write_json(part_path(folder, number, "error"), content)


def raise_error(folder: Path, names: Sequence[str]) -> None:
    """Raise an error that a part has left, if there is one among these files, with the name of its machine."""
    left = sorted(name for name in names if name.endswith(".error"))
    if not left:
        return
    content = orjson.loads((folder / left[0]).read_bytes())
    host, text = content["host"], content["text"]
    if content["kind"] == "encoder":
        raise FastEncoderDiffersError(text)
    if content["kind"] == "user":
        faults = [(f"on {host}: {where}", key, rule, remedy) for where, key, rule, remedy in content["faults"]]
        raise UserError(Fault(where, rule, key, remedy=remedy) for where, key, rule, remedy in faults)
    if content["kind"] == "run":
        raise RunError(f"on {host}: {text}")
    if content["kind"] == "system":
        raise OSError(content["number"], f"{text}, on {host}", content["file"] or None)
    raise RunError(f"a tokenising process on {host} met an unforeseen error:\n{text}")


def check_corpus(files: Mapping[Path, FileRecord]) -> list[Path]:
    """Check that this machine has the files of a part; return those whose time of change differs, by which to compare.

    Raises:
        UserError: some are missing, or have another size.
    """
    faults: list[Fault] = []
    differing: list[Path] = []
    for path, record in files.items():
        try:
            status = path.stat()
        except OSError as error:
            rule = f"cannot be read here: {error.strerror}"
            remedy = "every machine of the cluster needs the corpus at the same path"
            faults.append(Fault(where=str(path), rule=rule, remedy=remedy))
            continue
        if status.st_size != record.bytes:
            rule = f"has {status.st_size:,} bytes here, and {record.bytes:,} where the step was started"
            faults.append(Fault(where=str(path), rule=rule, remedy="copy it here again"))
        elif status.st_mtime_ns != record.modified_ns:
            differing.append(path)
    if faults:
        raise UserError(faults[:10])
    return differing


def tell_hashes(folder: Path, number: int, hashes: Mapping[FileKey, str], of: Mapping[str, FileRecord]) -> None:
    """Leave the hashes of files of this machine, by their records where the step was started."""
    content = [(list(of[key.path].key), sha256) for key, sha256 in hashes.items()]
    write_bytes(part_path(folder, number, "hashes"), orjson.dumps([socket.gethostname(), content]))


def check_hashes(folder: Path, hashes: Mapping[FileKey, str]) -> None:
    """Compare what machines have hashed of their own copies with the corpus of this one.

    Raises:
        RunError: one differs; what was made from it is not used.
    """
    for path in sorted(folder.glob("part-*.hashes")):
        host, content = orjson.loads(path.read_bytes())
        for key, sha256 in content:
            if hashes.get(FileKey(*key), sha256) != sha256:
                (folder / work_folder.PLAN_NAME).unlink()
                raise RunError(
                    f"{key[0]} is another file on {host} than here, of the same size: the shards are not used. Copy it "
                    "there again, and run the same command, which starts over"
                )
