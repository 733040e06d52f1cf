"""The numbered steps. This file runs before `.venv` is entered, by any Python from 3.6 on: standard library only."""

import os
import signal
import sys


def enter(root: str) -> None:
    """Re-execute with ``.venv/bin/python``, if `setup.sh` has created it and it is not the one that runs.

    Processes started from here import no packages from the current folder.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    environment = os.path.join(root, ".venv")
    python = os.path.join(environment, "bin", "python")
    if os.path.exists(python) and os.path.realpath(sys.prefix) != os.path.realpath(environment):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the new one is ready for it
        os.execv(python, [python, *sys.argv])
    prepare()


def prepare() -> None:
    """Refuse an old Python; let Ctrl-C end the process at once until work begins: in an import it is a traceback."""
    if sys.version_info < (3, 11):  # noqa: UP036  # where there is no .venv
        own = "{}.{}".format(*sys.version_info)
        print(f"error: zerokara needs Python 3.11 or later, and this is {own}: run ./setup.sh", file=sys.stderr)
        sys.exit(2)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # it was closed (>&-)
    sys.stderr = sys.stderr or sys.stdout
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal may know few letters
            stream.reconfigure(errors="backslashreplace")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
