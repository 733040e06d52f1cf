"""The command line that the steps share: options, exit codes, and the next command, ready to paste.

Exit codes: 0 done, 1 failed while running, 2 wrong settings or input, 130 stopped.
"""

import argparse
import math
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerokara.base.errors import UserError, guarded
from zerokara.config.loading import FILES, load
from zerokara.config.settings import Settings
from zerokara.config.writing import help_text, overrides

COMMAND_NAME = "ZEROKARA_COMMAND"  # environment variable with the name by which the user called a shell script
FIT_MINUTES = 10.0  # default of --fit
SCRIPTS = {
    "0_clean_corpus.py": "clean_config.yaml",
    "plan.py": "config.yaml",
    "1_train_sentencepiece_tokenizer.py": "sentence_piece_config.yaml",
    "2_tokenize.sh": "config.yaml",
    "count_tokens.py": "config.yaml",
    "3_train_node1.sh": "config.yaml",
    "4_convert_to_HF.sh": "convert_config.yaml",
    "5_generate.py": "convert_config.yaml",
    "6_upload.py": "convert_config.yaml",
    "7_finetune.sh": "finetune_config.yaml",
    "8_evaluate.py": "evaluate_config.yaml",
}
"""The numbered scripts, and the default configuration file of each."""


@dataclass(frozen=True)
class Options:
    """The options of the command line that are not settings; None or False where a flag is not given."""

    config_path: Path
    overrides: Sequence[str] = ()
    redo: bool = False
    dry_run: bool = False
    write: bool = False
    verbose: bool = False
    verify_resume: int | None = None
    evaluate: str | None = None  # name of the checkpoint to validate; "" for the newest
    hours: float | None = None
    tokens: float | None = None
    fit: float | None = None
    models: int | None = None
    join: str | None = None
    host: str | None = None
    part: tuple[int, int] | None = None
    merge: tuple[int, int] | None = None  # number and count, as `part`; (0, 1) for the whole merge
    prompt: str | None = None
    temperature: float | None = None
    seed: int | None = None
    argv: Sequence[str] = ()  # the command line itself
    resume_command: str = "the same command"  # resumes this one


def _positive(kind: Callable[[str], float], or_zero: bool = False, below: float = math.inf) -> Callable[[str], float]:
    """Return a parser of numbers above 0."""
    high = "finite" if below == math.inf else f"below {below}"

    def number(text: str) -> float:
        value, low = kind(text), "above 0" if kind is float else "at least 1"
        if not 0 < value < below and not (or_zero and value == 0):
            raise argparse.ArgumentTypeError(f"{text}: must be {low} and {high}{', or 0' * or_zero}")
        return value

    return number


def _share(text: str) -> tuple[int, int]:
    """Parse ``3/20`` as (3, 20)."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and int(number) < int(of)):
        raise argparse.ArgumentTypeError(f"{text}: must be a number and a count, from 0/20 to 19/20")
    return int(number), int(of)


_FLAGS: dict[str, dict[str, Any]] = {
    **{name: {"action": "store_true"} for name in ("redo", "dry_run", "write", "verbose")},
    "prompt": {"nargs": "?"},
    "temperature": {"type": _positive(float, or_zero=True), "metavar": "T"},
    "seed": {"type": _positive(int, or_zero=True, below=2**63), "metavar": "N"},
    "hours": {"type": _positive(float), "metavar": "H"},
    "tokens": {"type": _positive(lambda text: float(text) // 1), "metavar": "N"},  # 1e9; not half a token
    "fit": {"type": _positive(float), "nargs": "?", "const": FIT_MINUTES, "metavar": "MINUTES"},
    "models": {"type": _positive(int), "metavar": "K"},
    "verify_resume": {"type": _positive(int), "nargs": "?", "const": 3, "metavar": "N"},
    "join": {"metavar": "HOST[:PORT]"},
    "host": {"metavar": "HOST[:PORT]"},
    "part": {"type": _share, "metavar": "I/N"},
    "merge": {"type": _share, "nargs": "?", "const": (0, 1), "metavar": "I/N"},
    "evaluate": {"nargs": "?", "const": "", "metavar": "CHECKPOINT"},
}
_SHARED_HELP = {
    "redo": "do it again, and replace the outputs of an earlier run",
    "dry_run": "check everything, print what would be done, and stop",
}


def parse(script: str, doc: str | None, argv: Sequence[str], **flags: str) -> Options:
    """Read the command line; `flags` are the help texts of this step's flags."""
    default = SCRIPTS[script]
    settings = "" if {"-h", "--help"}.isdisjoint(argv) else help_text(FILES[default])
    parser = argparse.ArgumentParser(
        prog=os.environ.get(COMMAND_NAME),
        description=doc,
        epilog=f"settings (in the YAML file, or --set for once; docs/glossary.md explains the terms):\n{settings}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # "--re" must not mean --redo
    )
    help_ = f"YAML file with the settings (default {default})"
    parser.add_argument("--config", dest="config_path", type=Path, default=default, metavar="PATH", help=help_)
    help_ = "override one setting in this command alone, e.g. --set lr=3e-4; repeatable"
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=help_)
    for name, help_ in (_SHARED_HELP | flags).items():
        if help_:  # else it would have no effect here
            option = name if name == "prompt" else f"--{name.replace('_', '-')}"
            parser.add_argument(option, help=help_, **_FLAGS[name])
    return Options(**vars(parser.parse_args(argv)), argv=argv, resume_command=resume_command(argv))


def run(script: str, work: Callable[[Any, Options], None], doc: str | None, argv: Sequence[str], **flags: str) -> int:
    """Load the configuration, do a step's work, and return its exit code. `doc` and `flags` are as in `parse`."""
    options = parse(script, doc, argv, **flags)
    config_class, path = FILES[SCRIPTS[script]], options.config_path

    def begin() -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # of `prepare`
            signal.signal(signal.SIGINT, signal.default_int_handler)
        work(load(config_class, path, options.overrides), options)

    return guarded(begin, options.resume_command)


def resume_command(argv: Sequence[str], without: Sequence[str] = ()) -> str:
    """Return the command that was typed, without some flags; "the same command" if it is not known."""
    script, module = _called(), getattr(sys.modules["__main__"], "__spec__", None)
    if script is not None:
        called = _program(script)
    elif module is not None and module.name == "zerokara.steps.__main__":
        called = ["python", "-m", "zerokara.steps", sys.argv[1]]
    else:
        return "the same command"
    return shlex.join([*called, *(word for word in argv if word not in without)])


def next_command(
    script: str, options: Options, config: Settings, *made: Mapping[str, Any], flags: Sequence[str] = ()
) -> str:
    """Return the command of `script` that continues from this step, whose configuration is `config`.

    If `script` reads the same configuration file, the command repeats the ``--set`` of this step. Otherwise it names
    the file of the same set (ja_convert_config.yaml for ja_config.yaml) or the default one, and sets each mapping in
    `made`, this step's outputs, unless that file already has its first setting, or names a path inside it.
    """
    folder, default, path = (_called() or Path()).parent, SCRIPTS[script], options.config_path
    own = next(name for name, config_class in FILES.items() if isinstance(config, config_class))
    passed_on = list(options.overrides)
    if default != own:
        # The current folder may have none.
        places = path.with_name(path.name.removesuffix(own) + default), Path(default), folder / default
        path = next((place for place in places if place.is_file()), Path(default))
        passed_on = [text for settings in made for text in overrides(_lacking(FILES[default], path, settings))]
    words = [*_program(folder / script), *flags, *([] if str(path) == default else ["--config", str(path)])]
    return shlex.join([*words, *(word for text in passed_on for word in ("--set", text))])


def _lacking(config_class: type[Settings], path: Path, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `settings` that a configuration file lacks; none if it has the first, or names something inside it."""
    try:
        config = load(config_class, path)
    except UserError:  # that step will report it
        return settings
    key, made = next(iter(settings.items()))
    if isinstance(made, str) and Path(getattr(config, key)).resolve().is_relative_to(Path(made).resolve()):
        return {}
    return {key: value for key, value in settings.items() if getattr(config, key) != value}


def _called() -> Path | None:
    """Return the numbered script that started this process, as the user wrote it."""
    script = Path(os.environ.get(COMMAND_NAME, sys.argv[0]).removeprefix("bash "))
    return script if script.name in SCRIPTS else None


def _program(script: Path) -> list[str]:
    return ["bash" if script.suffix == ".sh" else "python", str(script)]
