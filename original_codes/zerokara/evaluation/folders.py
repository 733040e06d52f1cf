"""Folders of Hugging Face models, as far as names tell, and names for tables.

No torch here: a wrong name is refused at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zerokara.errors import Fault

_CONTENT = (".safetensors", ".json", ".model", ".txt", ".jinja")
"""Files that make a model what it is: weights, configuration, tokenizer (vocab.txt, merges.txt)."""
_RECORDS = ("manifest.json", "upload.manifest.json", "trainer_state.json")


def check_folder(folder: Path) -> Fault | None:
    """What keeps a folder from being a model, as far as names tell; needs no torch."""
    if not folder.is_dir():
        return Fault(str(folder), "there is no such folder", remedy="name a Hugging Face folder on this machine")
    if not (folder / "config.json").is_file():
        return Fault(str(folder), "holds no config.json: it is not a Hugging Face model", remedy="name its folder")
    if not list(folder.glob("*.safetensors")):
        rule = "holds no .safetensors (weights in pickled files are not opened: they can run code)"
        return Fault(str(folder), rule, remedy="save it again with model.save_pretrained(folder)")
    return None


def model_files(folder: Path) -> list[Path]:
    """The files of a folder that make the model what it is, by name."""
    files = [path for path in folder.iterdir() if path.is_file() and path.suffix in _CONTENT]
    return sorted(path for path in files if path.name not in _RECORDS)


def short_names(paths: Sequence[Path]) -> list[str]:
    """Each path's last parts, as many as tell them all apart."""
    parts = [path.absolute().parts for path in paths]
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return list(map(str, paths))
