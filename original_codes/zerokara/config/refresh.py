"""Rewrite the comments of configuration files from the docstrings, keeping their values.

``python -m zerokara.config.refresh config.yaml model_configs/*.yaml``: run it after a docstring or a field changed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from zerokara.config.loading import load
from zerokara.config.other_names import FILES
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.rendering import as_yaml
from zerokara.config.settings import Settings
from zerokara.durable import write_text


def class_for(path: Path) -> type[Settings]:
    """The configuration class that a file holds, by the end of its name."""
    return next((file.config_class for file in FILES if path.name.endswith(file.name)), PretrainConfig)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write_text(Path(name), as_yaml(load(class_for(Path(name)), name)))
