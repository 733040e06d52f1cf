"""Errors that end a step, and the faults of a configuration or an input.

A *user error* (exit code 2): the configuration or the input is wrong, and nothing was done; it holds every fault, with
place, key, value, rule and remedy. A *run error* (exit code 1): something failed while running. A *stopped* step (exit
code 130) resumes when it is run again. Messages quote libraries and servers, so each is `redacted`.
"""

import difflib
import errno
import glob
import io
import os
import re
import select
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zerokara.base.progress import plain

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
INTERRUPTED = 130  # exit code after Ctrl-C, as in shells (128 + SIGINT)
# Line ends, terminal controls, text-direction controls, and lone surrogates.
_NOT_SHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udc7f\udd00-\udfff]")
_MAX_VALUE_CHARACTERS, _MAX_MESSAGE_CHARACTERS = 500, 50_000  # a server may answer with a whole page
_CUT = "…"
_REST = r"(?:[^\s'\"<>]*[^\s'\"<>).,;:\]}])?"  # of an address, without the end of the sentence around it
_SCHEME = r"\b[a-z][a-z0-9+.-]{1,30}://"
# Lengths are bounded, so that no answer of a server keeps the expressions busy.
_REDACTIONS = (
    (rf"(?i)({_SCHEME})[^\s/?#'\"<>]{{0,500}}@", rf"\1{_CUT}@"),  # user:password@host
    (rf"(?i)({_SCHEME}[^\s?#'\"<>]{{0,2000}})[?#]{_REST}", rf"\1?{_CUT}"),
    (rf"([?&])(?:amp;)?[\w.~%-]{{1,100}}={_REST}", rf"\1{_CUT}"),  # urllib3 quotes an address without its host
    (rf"(?i)\bx-(?:amz|goog)-[\w-]{{1,60}}={_REST}", _CUT),
    # What S3 answers to a wrong signature: the parts that it was made of.
    (r"<(AWSAccessKeyId|SignatureProvided|StringToSign\w*|CanonicalRequest\w*)>[^<]*", rf"<\1>{_CUT}"),
    (r"(?i)((?:authorization|cookie|x-api-key)['\"]?\s*[:=]\s*(?:b?['\"])?)[^'\"\r\n]+", rf"\1{_CUT}"),
    (r"\bBearer\s+[\w.~+/=-]{8,}", f"Bearer {_CUT}"),
    (r"\bhf_(?:[a-z]+_)?[A-Za-z0-9]{20,}", f"hf_{_CUT}"),
    (r"\bwandb_v1_\w{20,}", f"wandb_v1_{_CUT}"),
    (r"\beyJ[\w-]{10,2000}\.[\w-]+\.[\w-]*", _CUT),  # JSON web tokens, as Xet has them
)
_SECRET_VARIABLES = (
    "TOKEN", "API_KEY", "ACCESS_KEY", "SECRET_KEY", "STORAGE_KEY", "ACCOUNT_KEY", "SECRET", "PASSWORD", "PASSWD",
    "CONNECTION_STRING",
)  # fmt: skip


def redacted(text: str) -> str:
    """Cut secrets out of a text: user, password and query of addresses; secret headers; and tokens, which are known by
    their form, or as the value of an environment variable that is named like one."""
    if len(text) > _MAX_MESSAGE_CHARACTERS:
        text = f"{text[:_MAX_MESSAGE_CHARACTERS]}{_CUT} ({len(text) - _MAX_MESSAGE_CHARACTERS:,} characters more)"
    for name, value in ((name, value.strip()) for name, value in os.environ.items()):
        if len(value) >= 8 and name.upper().endswith(_SECRET_VARIABLES):  # a shorter one (TOKEN=1) would blot out words
            text = text.replace(value, _CUT)
    for pattern, replacement in _REDACTIONS:
        text = re.sub(pattern, replacement, text)
    return text


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: ``config.yaml:14: lr = -1: must be greater than 0; try 3e-4``."""

    where: str  # ``file:line``, or the file or folder at fault
    rule: str  # ``must be greater than 0``
    key: str | None = None
    value: object = ...  # left out of the text if it is `...`, which stays the same on the way from a worker process
    remedy: str = ""
    reads: tuple[str, ...] = ()  # the settings on which a rule of a configuration depends, that of `key` among them

    def __str__(self) -> str:
        subject = [self.key] if self.key else []
        if self.value is not ...:
            value = str(self.value)
            subject.append(value if len(value) <= _MAX_VALUE_CHARACTERS else value[:_MAX_VALUE_CHARACTERS] + _CUT)
        text = ": ".join(part for part in (self.where, " = ".join(subject), self.rule) if part)
        return redacted(f"{text}; {self.remedy}" if self.remedy else text)


def shown(path: str | os.PathLike[str]) -> str:
    """Return a file name as text that any terminal, log and JSON file can hold, without loss: ``\\xNN`` for bytes that
    are not UTF-8, ``\\uNNNN`` for characters that would end a line or control a terminal, ``\\\\`` for a backslash."""
    text = _NOT_SHOWN.sub(lambda match: f"\\u{ord(match[0]):04x}", os.fspath(path).replace("\\", r"\\"))
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def nearest(named: str | os.PathLike[str], otherwise: str = "") -> str:
    """Return a remedy for a path: where it does not exist, the name most like it; else what its folder holds."""
    path, found = Path(named), ""
    with suppress(OSError):
        folder = next(each for each in (path, *path.parents, Path()) if each.is_dir())
        names = {_key(name): name for name in os.listdir(folder)[:10_000]}  # compared in under a second
        found = f"{shown(folder.absolute())} {holding(names.values())}"
        wrong, *rest = ("*",) if path.exists() else path.relative_to(folder).parts
        for like in [] if glob.has_magic(wrong) else difflib.get_close_matches(_key(wrong), names, 1, 0.72):
            near = Path(folder, names[like])
            found = f"the nearest name is {shown(whole if (whole := near.joinpath(*rest)).exists() else near)}"
            if near.name.casefold() != wrong.casefold() and _key(near.name) == _key(wrong):  # as macOS writes names
                found += f", which looks alike and has other characters: {near.name!a}"
    return "; or ".join(filter(None, (found, otherwise)))


def _key(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def holding(names: Iterable[str]) -> str:
    """Return the first of the names in a folder, hidden ones last, as text."""
    first = sorted(map(shown, names), key=lambda name: (name.startswith("."), name))
    return f"holds {', '.join(first[:8])}{', …' if first[8:] else ''}" if first else "is empty"


class UserError(Exception):
    """The configuration or the input is wrong. Holds every fault, so that all can be fixed at once."""

    exit_code = 2

    def __init__(self, faults: Fault | Iterable[Fault]):
        self.faults: list[Fault] = [faults] if isinstance(faults, Fault) else list(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


def refuse(faults: Iterable[Fault]) -> None:
    """Raise UserError with all `faults`, if there are any."""
    if found := list(faults):
        raise UserError(found)


def check_hub_token() -> None:
    """Raise UserError if the Hub's token holds a character that no token has, as a copied quote; it is not shown."""
    from huggingface_hub import constants, get_token

    if (token := get_token()) and not re.fullmatch(r"[\w.~+/-]+=*", token, re.ASCII):  # RFC 6750, section 2.1
        place = next(filter(os.environ.get, ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")), constants.HF_TOKEN_PATH)
        rule = "holds a character that no token has, such as a quotation mark, a space or an accent"
        raise UserError(Fault(place, rule, remedy="copy the token again, and nothing else"))


class RunError(Exception):
    """Something failed while running; the message tells where, the values found and expected, and the remedy."""

    exit_code = 1

    def __init__(self, message: str):
        super().__init__(redacted(message))


class Stopped(KeyboardInterrupt):
    """A step was stopped as by Ctrl-C, and the same command would not resume it; the message tells how to resume."""


def guarded(work: Callable[[], None], resume_command: str = "") -> int:
    """Run `work` and turn its errors into messages and an exit code. An unexpected one keeps its traceback, redacted.

    `resume_command` resumes interrupted work; it is not mentioned if it is empty.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that the encoding lacks are escaped
            stream.reconfigure(errors="backslashreplace")
    code, message, resumed = 0, "", f"; to resume: {resume_command}" if resume_command else ""
    try:
        work()
    except UserError as error:
        code, message = error.exit_code, "\n".join(f"error: {fault}" for fault in error.faults)
    except RunError as error:
        code, message = error.exit_code, f"failed: {error}"
    except KeyboardInterrupt as stop:
        code, message = INTERRUPTED, f"stopped; {stop}" if str(stop) else f"stopped{resumed}"
    except Exception as error:
        code, message = RunError.exit_code, traceback.format_exc().rstrip()  # unexpected
        if isinstance(error, BrokenPipeError) and _is_unread():
            code, message = 141, f"stopped: the output is no longer read{resumed}"  # as in shells: 128 + SIGPIPE
        elif isinstance(error, OSError) and (error.filename is not None or error.errno in NO_ROOM):
            name = "" if error.filename is None else f" {shown(os.fsdecode(error.filename))}"  # a write has none
            message = f"failed: cannot read or write{name}: {error.strerror or error}"
            message += "; make room, or raise a limit (ulimit -f), and run it again" if error.errno in NO_ROOM else ""
        elif type(error).__name__ == "OutOfMemoryError" and resume_command:  # torch's; it is not imported here
            remedy = "if another program holds the GPU, wait for it, or compute on the CPU with CUDA_VISIBLE_DEVICES="
            message = f"failed: {str(error).partition('. ')[0]}; {remedy}"
    if message:
        print(plain(redacted(message)), file=sys.stderr)
    _is_unread()
    return code


def _is_unread() -> bool:
    """Tell whether the reader of a pipe is gone (``| head``); if so, nothing more is printed."""
    with suppress(OSError):  # stdout is not a file in a test
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if any(events & select.POLLERR for _, events in output.poll(0)):
            # Otherwise Python would report it once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return True
    return False
