"""List the runs and exports that `--redo` has set aside (`models/it.old-1`), with their sizes; delete them on request.

Only what zerokara made is ever deleted: a run folder, or an export in which every file is as step 4 wrote it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from zerokara import manifest
from zerokara.checkpoint.folders import IDENTITY_NAME
from zerokara.durable import ASIDE_ENDING
from zerokara.errors import Fault, UserError, guarded, nearest, shown
from zerokara.huggingface.exported_folder import MANIFEST_NAME, STEP, to_keep
from zerokara.progress import bytes_text, log, plain, plural


def find(folder: Path) -> Iterator[tuple[Path, str, list[str]]]:
    """Folders that were set aside, the file that marks each as ours, and in an export the files of somebody else."""
    for name, folders, _ in os.walk(folder):
        aside = [each for each in folders if re.search(re.escape(ASIDE_ENDING) + r"\d+$", each)]
        for path in sorted(Path(name, each) for each in aside):
            if path.is_symlink():
                continue
            if (path / IDENTITY_NAME).is_file():
                yield path, IDENTITY_NAME, []
            elif (path / MANIFEST_NAME).is_file():
                with suppress(UserError):  # another program's
                    if manifest.read(path / MANIFEST_NAME).step == STEP:
                        yield path, MANIFEST_NAME, to_keep(path)
        folders[:] = [each for each in folders if each not in aside and not each.startswith(".")]


def clean(folders: Sequence[Path], is_deleting: bool) -> None:
    """List what was set aside in these folders, or delete it."""
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise UserError(Fault(shown(missing[0]), "there is no such folder", remedy=nearest(missing[0])))
    freed, found = 0, [each for folder in folders for each in find(folder)]
    for path, mark, others in found:
        size = sum(file.lstat().st_size for file in path.rglob("*"))
        note = f"; kept for {', '.join(others[:5])}{' …' if others[5:] else ''}" if others else ""
        print(plain(f"{bytes_text(size):>10}  {path}{note}"))
        if not others:
            freed += size
            if is_deleting:  # what marks it as ours goes last: a deletion that was stopped is taken up again
                for child in sorted(path.iterdir(), key=lambda child: child.name == mark):
                    shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
                path.rmdir()
    outcome = "freed" if is_deleting or not freed else "to free: --delete deletes all but those that are kept"
    log(f"{plural(len(found), 'folder')} set aside; {bytes_text(freed)} {outcome}")


def main(argv: Sequence[str]) -> int:
    """Read the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    help_ = "folders to search, with those in them (default: the current one)"
    parser.add_argument("folders", nargs="*", type=Path, default=[Path()], metavar="FOLDER", help=help_)
    parser.add_argument("--delete", action="store_true", help="delete what is listed")
    options = parser.parse_args(argv)
    return guarded(lambda: clean(options.folders, options.delete))
