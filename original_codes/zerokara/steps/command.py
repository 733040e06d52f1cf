"""The options that all steps share, and their exit codes: 0 done, 1 failed while running, 2 wrong settings or input."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from zerokara.config.loading import load
from zerokara.config.rendering import help_text
from zerokara.config.settings import Settings
from zerokara.errors import guarded
from zerokara.steps.next_command import COMMAND_NAME, again
from zerokara.steps.options import Options

_Config = TypeVar("_Config", bound=Settings)
REDO_HELP = "do it again, and replace the outputs of an earlier run"


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
    "evaluate": {"nargs": "?", "const": "", "metavar": "CHECKPOINT"},
}
"""Flags that not every step has: arguments of argparse's `add_argument`."""


def run(
    main: Callable[[_Config, Options], None],
    argv: Sequence[str],
    config_class: type[_Config],
    default_config: str,
    doc: str,
    **flags: str,
) -> int:
    """Load the configuration, run a step, and return its exit code; errors are printed on stderr.

    `flags`: as in `parse`, `redo` among them.
    """
    options = parse(argv, config_class, default_config, doc, **flags)
    return guarded(lambda: main(load(config_class, options.config_path, options.overrides), options), options.again)
