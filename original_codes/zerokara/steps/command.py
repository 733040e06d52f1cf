"""The options that all steps share, and their exit codes: 0 done, 1 failed while running, 2 wrong settings or input."""

from __future__ import annotations

import argparse
import io
import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from zerokara.config.loading import load
from zerokara.config.rendering import help_text
from zerokara.config.settings import Settings
from zerokara.errors import RunError, Stopped, UserError, redacted, shown
from zerokara.progress import plain
from zerokara.steps.next_command import COMMAND_NAME, again
from zerokara.steps.options import SAME_COMMAND, Options

_Config = TypeVar("_Config", bound=Settings)
REDO_HELP = "do it again, and replace the outputs of an earlier run"
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells (128 + SIGINT)."""
UNREAD = 141
"""Exit code if the reader of the output is gone, as in shells (128 + SIGPIPE)."""


def parse(
    argv: Sequence[str],
    config_class: type[Settings],
    default_config: str,
    doc: str,
    redo: str = REDO_HELP,
    **flags: str,
) -> Options:
    """Read the command line; `redo` is the help of that flag, `flags` the help of those of `_FLAGS` that a step has."""
    wants_help = not {"-h", "--help"}.isdisjoint(argv)
    parser = argparse.ArgumentParser(
        prog=os.environ.get(COMMAND_NAME),
        description=doc,
        epilog="settings (in the YAML file, or --set for one run; docs/glossary.md explains the terms):\n"
        + (help_text(config_class) if wants_help else ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # "--re" must not mean --redo
    )
    parser.add_argument(
        "--config",
        dest="config_path",
        type=Path,
        default=Path(default_config),
        metavar="PATH",
        help=f"YAML file with the settings (default {default_config})",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one setting for this run, e.g. --set lr=3e-4; repeatable",
    )
    parser.add_argument("--redo", action="store_true", help=redo)
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would be done, and stop")
    for name, text in flags.items():
        parser.add_argument(f"--{name.replace('_', '-')}", help=text, **_FLAGS[name])
    return Options(**vars(parser.parse_args(argv)), again=again(argv))


def _steps(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: must be a number of steps, 1 or more")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a number above 0")
    return number


FIT_MINUTES = 10.0
_FLAGS: dict[str, dict[str, Any]] = {
    "write": {"action": "store_true"},
    "hours": {"type": _positive, "metavar": "H"},
    "tokens": {"type": _positive, "metavar": "N"},
    "fit": {"type": _positive, "nargs": "?", "const": FIT_MINUTES, "metavar": "MINUTES"},
    "verify_resume": {"type": _steps, "nargs": "?", "const": 3, "metavar": "N"},
    "join": {"metavar": "HOST[:PORT]"},
    "host": {"metavar": "HOST[:PORT]"},
    "test": {"metavar": "CHECKPOINT"},
    "evaluate": {"nargs": "?", "const": "", "metavar": "CHECKPOINT"},
}
"""Flags that not every step has: arguments of argparse's `add_argument`."""


def run(
    main: Callable[[_Config, Options], None],
    argv: Sequence[str],
    config_class: type[_Config],
    default_config: str,
    doc: str,
    *,
    is_part: bool = False,
    **flags: str,
) -> int:
    """Load the configuration, run a step, and return its exit code; errors are printed on stderr.

    A step that `is_part` of another one, which started it, does not print the command to resume. `flags`: as in
    `parse`, `redo` among them.
    """
    options = parse(argv, config_class, default_config, doc, **flags)
    if is_part:
        options = replace(options, again="")
    return guarded(lambda: main(load(config_class, options.config_path, options.overrides), options), options.again)


def guarded(work: Callable[[], None], again: str = SAME_COMMAND) -> int:
    """Run `work` and turn its errors into messages and an exit code. An unexpected one keeps its traceback, redacted.

    `again` is the command that resumes interrupted work; it is not mentioned if it is empty.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that the encoding lacks are escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        work()
    except UserError as error:
        for fault in error.faults:
            print(f"error: {plain(str(fault))}", file=sys.stderr)
        return error.exit_code
    except RunError as error:
        print(f"failed: {plain(str(error))}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            print(f"stopped: the output is no longer read; to resume: {again or SAME_COMMAND}", file=sys.stderr)
            return UNREAD
        if isinstance(error, OSError) and error.filename is not None:
            message = f"failed: cannot read or write {shown(os.fsdecode(error.filename))}: {error.strerror or error}"
        else:  # unexpected
            message = traceback.format_exc().rstrip()
        print(plain(redacted(message)), file=sys.stderr)
        return RunError.exit_code
    except Stopped as stop:
        print(f"stopped; {stop}", file=sys.stderr)
        return INTERRUPTED
    except KeyboardInterrupt:
        print(f"stopped; to resume: {again}" if again else "stopped", file=sys.stderr)
        return INTERRUPTED
    _is_unread()
    return 0


def _is_unread() -> bool:
    """Whether the reader of a pipe is gone (``| head``); if so, nothing more is printed."""
    with suppress(OSError):  # stdout is not a file in a test
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if any(events & select.POLLERR for _, events in output.poll(0)):
            # Otherwise Python would report it once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return True
    return False
