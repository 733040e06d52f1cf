"""`python -m zerokara.steps tokenize --help`: the command line of a step, by the name of its module.

Of a main program of another name multiprocessing would import all of it again into every worker.
"""

from __future__ import annotations

import sys
from importlib import import_module

from zerokara.steps import stop_at_once

if __name__ == "__main__":
    stop_at_once()
    sys.exit(import_module(f"zerokara.steps.{sys.argv[1]}").main(sys.argv[2:]))
