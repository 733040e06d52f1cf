"""What a step reads that another step made: checked where the configuration names it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zerokara import manifest
from zerokara.config.data import DataSettings
from zerokara.config.loading import load
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.errors import UserError
from zerokara.steps.command import TRAIN_TOKENIZER
from zerokara.steps.outputs import TOKENIZER_NAMES, TOKENIZER_STEP


def check_tokenizer_file(config: DataSettings) -> None:
    """Check that `input_tokenizer_file` names a file with content.

    Raises:
        UserError: it does not; the remedy names the newest tokenizer of step 1 where there is one.
    """
    path = Path(config.input_tokenizer_file)
    if path.is_file() and path.stat().st_size:
        return
    rule = "the tokenizer file is empty" if path.is_file() else "there is no such tokenizer file"
    made = newest_tokenizer(config)
    remedy = f"write input_tokenizer_file: {made}" if made else "make one with step 1, and name its tokenizer.model"
    raise UserError(config.fault("input_tokenizer_file", rule, remedy))


def newest_tokenizer(config: DataSettings) -> Path | None:
    """The newest `tokenizer.model` of step 1, near the one that is named and where step 1's configuration puts it."""
    made = []
    for folder in _tokenizer_folders(config):
        try:
            is_ours = manifest.read(folder / "manifest.json").step == TOKENIZER_STEP
        except (UserError, OSError):
            continue
        model = folder / TOKENIZER_NAMES[0]
        if is_ours and model.is_file() and model.stat().st_size:
            made.append((model.stat().st_mtime_ns, model))
    return max(made)[1] if made else None


def _tokenizer_folders(config: DataSettings) -> Iterator[Path]:
    named = Path(config.input_tokenizer_file).parent
    yield named
    yield from named.parent.glob("*/")
    try:
        yield Path(load(TokenizerConfig, config.path.with_name(TRAIN_TOKENIZER.config_name)).output_dir)
    except UserError:
        return
