"""`python -m zerokara.steps tokenize --help`, or `zerokara tokenize --help`: a step, by the name of its module.

This file must be named ``__main__``: multiprocessing imports a main program of any other name again in every worker.
"""

import sys
from importlib import import_module
from pathlib import Path

from zerokara import __version__
from zerokara.steps import prepare


def main() -> int:
    """Run the step that the command line names, or print the names of the steps, or the version."""
    prepare()
    name, *arguments = sys.argv[1:] or ["--help"]
    steps = {path.stem for path in Path(__file__).parent.glob("[a-z]*.py")} - {"command"}
    if name in steps:
        return import_module(f"zerokara.steps.{name}").main(arguments)
    usage = f"usage: zerokara STEP [--help]: {', '.join(sorted(steps - {'preflight'}))}"
    print(f"zerokara {__version__}" if name == "--version" else usage)
    return 0 if name in ("--version", "--help", "-h") else 2


if __name__ == "__main__":
    sys.exit(main())
