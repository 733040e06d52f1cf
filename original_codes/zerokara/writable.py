"""Whether something can be written at a place, found out before hours of work, and without leaving anything there.

The nearest folder that is there is asked for a file without a name (open(2), O_TMPFILE), which never becomes visible.
That is the only question that also root gets a true answer to: permission bits do not bind it, a read-only file system
does. Where a file system knows no such files (NFS, FUSE), one is made and removed at once.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

from zerokara.durable import PARTIAL_SUFFIX

_TEMPORARY_BYTES = 20
"""What `durable` adds to a name while it is being written: a number of a process, and an ending."""
_NO_NAMELESS_FILES = {errno.EOPNOTSUPP, errno.EISDIR}
"""open(2): the file system, or the kernel, lacks O_TMPFILE."""
_SHOWN_CHARACTERS = 100


def reason_against_folder(path: Path) -> str:
    """Why no file can be put into the folder `path`, which is made with its parents; empty where one can."""
    missing: list[str] = []
    place = path.absolute()
    while True:
        try:
            mode = os.stat(place).st_mode
            break
        except FileNotFoundError:
            if place.is_symlink():
                return f"{_shown(place)} is a link to what is not there"
            missing.append(place.name)
        except NotADirectoryError:  # it lies below a file, which is named when it is come to
            pass
        except OSError as error:
            return _words(place, error)
        place = place.parent
    if not stat.S_ISDIR(mode):
        return f"{_shown(place)} is a file, not a folder"
    return _too_long(place, missing) or _refusal(place)


def reason_against_entry(path: Path) -> str:
    """Why nothing new can take the name `path`, be it there already or not; empty where something can."""
    path = path.absolute()
    return reason_against_folder(path.parent) or _too_long(_nearest(path.parent), [path.name])


def reason_against_file(path: Path) -> str:
    """As `reason_against_entry`, of a file: a folder of that name stands in its way."""
    return f"{_shown(path)} is a folder" if os.path.isdir(path) else reason_against_entry(path)


def _nearest(folder: Path) -> Path:
    return next(place for place in [folder, *folder.parents] if os.path.isdir(place))


def _too_long(place: Path, names: list[str]) -> str:
    most = os.pathconf(place, "PC_NAME_MAX") - _TEMPORARY_BYTES
    for name in names:
        if len(os.fsencode(name)) > most:
            return f"the name {name[:30]}… has {len(os.fsencode(name))} bytes, and may have {most} there"
    return ""


def _refusal(folder: Path) -> str:
    """Why the system makes no file in `folder`."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600))
        return ""
    except OSError as error:
        if error.errno not in _NO_NAMELESS_FILES:
            return f"nothing can be made in {_words(folder, error)}"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, suffix=PARTIAL_SUFFIX):
            return ""
    except OSError as error:
        return f"nothing can be made in {_words(folder, error)}"


def _words(place: Path, error: OSError) -> str:
    return f"{_shown(place)}: {error.strerror}"


def _shown(place: Path) -> str:
    text = str(place)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
