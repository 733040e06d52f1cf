"""`python -m zerokara.steps tokenize --help`: the command line of a step, by the name of its module.

The main program is none of the steps' own modules, because multiprocessing imports it into every worker again, unless
it is a `__main__.py` (`multiprocessing.spawn`).
"""

from __future__ import annotations

import sys
from importlib import import_module

if __name__ == "__main__":
    sys.exit(import_module(f"zerokara.steps.{sys.argv[1]}").main(sys.argv[2:]))
