"""Rewrite the comments of configuration files from the docstrings, keeping their values.

``python -m zerokara.config.refresh config.yaml model_configs/*.yaml``: run it after a docstring or a field changed. The
class is told by the end of the name: ``convert_config.yaml``, ``sentence_piece_config.yaml``, else ``config.yaml``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from zerokara.config.convert_config import ConvertConfig
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.rendering import as_yaml
from zerokara.config.settings import Settings
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.durable import write_text


def class_for(path: Path) -> type[Settings]:
    """Which configuration a file holds."""
    if path.name.endswith("convert_config.yaml"):
        return ConvertConfig
    return TokenizerConfig if path.name.endswith("sentence_piece_config.yaml") else PretrainConfig


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write_text(Path(name), as_yaml(load(class_for(Path(name)), name)))
