"""Rewrites the comments of the configuration files that are shipped, and keeps their values.

Run it after a docstring or a field of the settings changed:
``python tests/support/rewritten_comments.py config.yaml model_configs/*.yaml``.
"""

import sys
from pathlib import Path

from zerokara.base.durable import write_file
from zerokara.config.loading import FILES, load
from zerokara.config.writing import as_yaml

if __name__ == "__main__":
    for argument in sys.argv[1:]:
        config_class = next(FILES[name] for name in FILES if argument.endswith(name))
        write_file(Path(argument), as_yaml(load(config_class, argument)))
