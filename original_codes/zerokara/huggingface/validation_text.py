"""Text that a run did not train on: the documents of its validation split, for whoever measures the exported model.

The split is the one that the model was trained with only if the hash of the training tokens is the one in the export's
manifest. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from zerokara import manifest
from zerokara.config.loading import RESOLVED_NAME, load_run
from zerokara.errors import UserError
from zerokara.huggingface.exported_folder import MANIFEST_NAME
from zerokara.tokens.indexed import IndexedTokens
from zerokara.tokens.layout import TokenPaths


def validation_text(
    model_dir: Path, run_dir: Path, decode: Callable[[list[int]], str], max_tokens: int = 2000
) -> str | None:
    """Return the first validation documents, up to `max_tokens`, or None if they are not on this machine.

    `run_dir` is the run folder, or a checkpoint in it, that `model_dir` was exported from; `decode` turns token ids
    into text.
    """
    folder = next((each for each in (run_dir, run_dir.parent) if (each / RESOLVED_NAME).is_file()), None)
    if folder is None:
        return None
    try:
        paths = TokenPaths(load_run(folder / RESOLVED_NAME).output_prefix)
        trained_on = manifest.read(model_dir / MANIFEST_NAME).facts.get("data", {}).get("sha256")
        on_disk = manifest.read(paths.manifest)
    except UserError:
        return None
    if trained_on not in {record.sha256 for records in on_disk.outputs.values() for record in records}:
        return None
    documents, texts, room = IndexedTokens(paths.valid), [], max_tokens
    for number in range(len(documents)):
        if room <= 0:
            break
        ids = [int(token) for token in documents[number][:room]]
        texts.append(decode(ids))
        room -= len(ids)
    return "\n".join(texts) or None
