"""Plan a run before it costs anything; `python plan.py --help` explains it."""

import os
import sys

ROOT = os.path.dirname(os.path.realpath(__file__))
if sys.path[0] == ROOT:  # a file beside this one is never taken for a package
    del sys.path[0]
sys.path.insert(0, os.path.join(ROOT, "original_codes"))

from zerokara.steps import enter  # noqa: E402

if __name__ == "__main__":
    enter(ROOT)
    from zerokara.steps.plan import main

    sys.exit(main(sys.argv[1:]))
