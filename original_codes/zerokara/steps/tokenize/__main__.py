"""`python -m zerokara.steps.tokenize`.

A file of its own, because multiprocessing imports the program's main module into every worker again, unless its name
is `__main__` (`multiprocessing.spawn`).
"""

from __future__ import annotations

import sys

from zerokara.steps.tokenize import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
