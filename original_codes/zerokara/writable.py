"""Checks that a path can be written, before hours of work, and without leaving anything there.

In the nearest existing folder a temporary file is made: the only check that is right for root as well, who is bound by
a read-only file system, not by permission bits. `tempfile` makes one without a name (open(2), O_TMPFILE), which never
becomes visible; where a file system has no such files (NFS, FUSE), a named one that is removed at once.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from zerokara.durable import PARTIAL_SUFFIX

_TEMPORARY_BYTES = 20
"""What `durable` appends to a name while writing: a process id and an ending."""
_MAX_CHARACTERS = 100


def reason_against_folder(path: Path) -> str:
    """Why no file can be written into the folder `path`, which is made with its parents; empty if one can."""
    return _reason(path.absolute(), [])


def reason_against_entry(path: Path) -> str:
    """Why nothing new can get the name `path`, whether it exists or not; empty if something can."""
    path = path.absolute()
    return _reason(path.parent, [path.name])


def reason_against_file(path: Path) -> str:
    """As `reason_against_entry`, for a file: a folder of that name is in its way."""
    return f"{_shortened(path)} is a folder" if os.path.isdir(path) else reason_against_entry(path)


def _reason(folder: Path, missing: list[str]) -> str:
    """Why nothing of the names `missing` can be made in `folder`, or in its nearest parent that exists."""
    while True:
        try:
            mode = os.stat(folder).st_mode
            break
        except FileNotFoundError:
            if folder.is_symlink():
                return f"{_shortened(folder)} is a broken link"
            missing.append(folder.name)
        except NotADirectoryError:  # it is below a file, which the loop reaches
            pass
        except OSError as error:
            return _message(folder, error)
        folder = folder.parent
    if not stat.S_ISDIR(mode):
        return f"{_shortened(folder)} is a file, not a folder"
    return _too_long(folder, missing) or _refusal(folder)


def _too_long(folder: Path, names: list[str]) -> str:
    max_bytes = os.pathconf(folder, "PC_NAME_MAX") - _TEMPORARY_BYTES
    for name in names:
        if (num_bytes := len(os.fsencode(name))) > max_bytes:
            return f"the name {name[:30]}… has {num_bytes} bytes, and may have {max_bytes} there"
    return ""


def _refusal(folder: Path) -> str:
    """Why no file can be made in an existing folder; empty if one can."""
    try:
        with tempfile.TemporaryFile(dir=folder, suffix=PARTIAL_SUFFIX):
            return ""
    except OSError as error:
        return f"cannot write into {_message(folder, error)}"


def _message(path: Path, error: OSError) -> str:
    return f"{_shortened(path)}: {error.strerror}"


def _shortened(path: Path) -> str:
    text = str(path)
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + "…"
