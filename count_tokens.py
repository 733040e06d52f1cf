"""Count the tokens that step 2 wrote; `python count_tokens.py --help` tells more."""

import os
import sys

ROOT = os.path.dirname(os.path.realpath(__file__))
if sys.path[0] == ROOT:  # a file that lies beside this one never passes for a package of the same name
    del sys.path[0]
sys.path.insert(0, os.path.join(ROOT, "original_codes"))

from zerokara.steps.environment import enter  # noqa: E402

if __name__ == "__main__":
    enter(ROOT)
    from zerokara.steps.count_tokens import main

    sys.exit(main(sys.argv[1:]))
